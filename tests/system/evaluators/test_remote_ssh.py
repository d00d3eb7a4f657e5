"""The documented commands install an agent on a board by SSH and measure through it: a server here, an empty home."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.spaces.chain import chain_plan
from tests.support.commands import SEARCHED
from tests.support.remote_agents import ROOT
from tests.support.sentences import says

pytest.importorskip("grpc", reason="remote devices need the extra 'remote'")

PAGE = ROOT / "evaluators" / "remote" / "README.md"
SBIN = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


def documented(mark: str) -> str:
    """Return the command of the page that is marked."""
    found = re.search(rf"<!-- {mark} -->\n```sh\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert found, mark
    return found[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Board:
    """An SSH server for this user, whose sessions begin in an empty home and know none of this Python's environment.

    What pip would fetch is there already: packages of this Python stand behind those of the board's own environment.
    """

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        server, keygen = shutil.which("sshd", path=SBIN), shutil.which("ssh-keygen")
        if server is None or keygen is None or shutil.which("ssh") is None:
            pytest.skip("there is no SSH server (Debian: apt-get install openssh-server)")
        self.home.mkdir()
        (self.home / "bin").mkdir()
        (self.home / "packages").mkdir()
        python = self.home / "bin" / "python3"
        python.write_text(f'#!/bin/sh\nexec "{sys._base_executable}" "$@"\n')  # type: ignore[attr-defined]
        python.chmod(0o755)
        paths = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        (self.home / "packages" / "sitecustomize.py").write_text(f"import sys\nsys.path += {paths!r}\n")
        for name in ("host", "user"):
            subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where root's server has its processes jailed
        self._ssh = f"ssh -F {shlex.quote(str(folder / 'ssh_config'))}"
        log = folder / "sshd.log"
        self._errors = log.open("wb")
        for _ in range(5):  # a server of OpenSSH chooses no port itself, and another program may take the one given
            self._start(server, folder)
            if self._listens():
                break
        else:
            pytest.skip(f"the SSH server does not start here: {log.read_text().strip()[-300:]}")
        done = subprocess.run(self.command("ssh pi@board true"), shell=True, capture_output=True, check=False)
        if done.returncode:
            self.close()
            pytest.skip(f"nobody may log in here: {done.stderr.decode().strip()} {log.read_text().strip()[-300:]}")

    def _start(self, server: str, folder: Path) -> None:
        self._port = free_port()
        around = f'"HOME={self.home}" "PATH={self.home / "bin"}:/usr/bin:/bin" "PYTHONPATH={self.home / "packages"}"'
        (folder / "sshd_config").write_text(
            f"Port {self._port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\nPidFile none\n"
            f"AuthorizedKeysFile {folder / 'user.pub'}\nStrictModes no\nPasswordAuthentication no\n"
            f"PermitRootLogin yes\nSetEnv {around} PIP_NO_DEPS=1 PIP_DISABLE_PIP_VERSION_CHECK=1\n"
            'ForceCommand cd "$HOME" && exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"\n'
        )
        (folder / "ssh_config").write_text(
            f"Host board\n  HostName 127.0.0.1\n  Port {self._port}\n  IdentityFile {folder / 'user'}\n"
            "  IdentitiesOnly yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        self._server = subprocess.Popen([server, "-D", "-e", "-f", folder / "sshd_config"], stderr=self._errors)

    def _listens(self) -> bool:
        """Whether the server answers; False where it has ended."""
        for _ in range(200):
            if self._server.poll() is not None:
                return False
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return True
            time.sleep(0.05)
        self._server.kill()
        self._server.wait()
        return False

    def command(self, documented: str) -> str:
        """Return a command of the page, with this server as the board."""
        return re.sub(r"\bssh (?=-|pi@)", f"{self._ssh} ", documented).replace("pi@board", "board")

    def wrapper(self, folder: Path) -> Path:
        """Return a folder with a command ``ssh`` that knows this server as the host ``board``."""
        folder.mkdir()
        (folder / "ssh").write_text(f'#!/bin/sh\nexec {self._ssh.replace("ssh", shutil.which("ssh") or "", 1)} "$@"\n')
        (folder / "ssh").chmod(0o755)
        return folder

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()
        self._errors.close()


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    made = Board(tmp_path)
    with closing(made):
        yield made


def test_the_example_of_an_evaluator_reaches_a_board_by_ssh(
    board: Board, small: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ROOT / "experiments" / "example_evaluator"
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setenv("PATH", f"{board.wrapper(tmp_path / 'bin')}:{os.environ['PATH']}")
    example = importlib.import_module("example_evaluator")
    monkeypatch.setattr(example, "COMMAND", f"sh {package}/example_evaluator/by_ssh.sh board")
    evaluator = example.BoardEvaluator()
    with evaluator.prepare(evaluator.platform()) as session:
        candidate = session.load(small, chain_plan(small, (9,), ["cpu", "dsp"]))
        found = candidate.run(3)
        assert found.latency_s.shape == (3,)
        assert found.stage_s.shape == (3, 2)
        assert (found.latency_s > 0).all()
        assert candidate.verify().accepted
        candidate.close()
        monkeypatch.setattr(example, "COMMAND", f"sh {package}/example_evaluator/by_ssh.sh nowhere")
        with pytest.raises(UnavailableError, match="nowhere"):  # what ssh says differs from machine to machine
            session.load(small, chain_plan(small, (), ["cpu"])).run(1)


def test_the_example_of_a_tool_reaches_a_board_by_ssh(
    board: Board, small: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ROOT / "experiments" / "example_evaluator"
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setenv("PATH", f"{board.wrapper(tmp_path / 'bin')}:{os.environ['PATH']}")
    monkeypatch.setenv("BOARD_FOLDER", str(tmp_path))
    example = importlib.import_module("example_evaluator.tool")
    evaluator = example.ToolEvaluator()
    with evaluator.prepare(evaluator.platform()) as session:
        monkeypatch.setattr(example, "TOOL", f"sh {package}/example_evaluator/tool_by_ssh.sh board 'echo 1.5'")
        found = session.load(small, chain_plan(small, (9,), ["cpu", "dsp"])).run(2)
        assert found.latency_s.tolist() == [0.003, 0.003]
        monkeypatch.setattr(example, "TOOL", f"sh {package}/example_evaluator/tool_by_ssh.sh board 'test x ='")
        with pytest.raises(UnavailableError):
            session.load(small, chain_plan(small, (), ["cpu"])).run(1)


def test_the_documented_commands_measure_on_a_board(board: Board, tmp_path: Path) -> None:
    install = board.command(documented("install"))
    done = subprocess.run(["bash", "-c", install], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    where = "agent/bin/python -c 'import optimizer; print(optimizer.__file__)'"
    reported = subprocess.run(
        ["bash", "-c", board.command(f"ssh pi@board {shlex.quote(where)}")], capture_output=True, text=True, check=True
    )
    assert reported.stdout.startswith(str(board.home / "agent")), reported.stdout  # not this checkout
    here, there = free_port(), free_port()
    start = board.command(documented("start")).replace("7450:127.0.0.1:7450", f"{here}:127.0.0.1:{there}")
    start = f"exec {start} --listen 127.0.0.1:{there} --evaluator synthetic"
    with subprocess.Popen(["bash", "-c", start], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None  # a terminal has no other stream
            says(agent.stdout.readline())
            search = documented("search").replace("127.0.0.1:7450", f"127.0.0.1:{here}")
            words = shlex.split(search.replace("mobilenet_v1", "squeezenet1_1@0.25/64").replace("100", "3"))
            command = [
                sys.executable,
                "-m",
                "optimizer.cli",
                *words[1:],
                "--out",
                str(tmp_path / "run"),
                "--json",
                "-q",
            ]
            study = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            assert study.returncode in SEARCHED, study.stderr
            assert json.loads(study.stdout)["unique_plans"] == 3
        finally:
            agent.terminate()
    for _ in range(100):  # with the connection the agent ends, too
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", there)):
                return
        time.sleep(0.1)
    pytest.fail("the agent outlives its connection")

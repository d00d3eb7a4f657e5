"""The graphics adapters that Vulkan finds, and the driver file of each.

A separate process queries each driver, because a driver may crash, hang, or print: this file, run as a program. It
imports only the standard library, and the parent never loads a driver.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LIMIT_S = 20.0
_SOFTWARE_WORDS = ("swiftshader", "lvp", "lavapipe", "llvmpipe")
# Debian's chromium brings SwiftShader, but does not register it with the loader.
_MORE_FILES = ("/usr/lib/chromium/vk_swiftshader_icd.json", "/usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json")
_DEVICES = ("dri/renderD*", "nvidia[0-9]*", "kgsl*", "mali*", "dxg")
_KINDS = ("other", "integrated", "discrete", "virtual", "software")


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter.

    Attributes:
        name: as the driver reports it (``NVIDIA H200``).
        kind: ``discrete``, ``integrated``, ``virtual``, ``other``, or ``software``, which computes on the CPU.
        driver_file: path of the driver's Vulkan manifest (ICD file).
        driver_version, api_version: as the driver reports them.
    """

    name: str
    kind: str
    driver_file: str
    driver_version: str
    api_version: str

    def matches(self, word: str) -> bool:
        """Return whether ``word`` is in the adapter's or its driver file's name, whatever the case."""
        names = f"{self.name} {Path(self.driver_file).name}".lower()
        if "llvmpipe" in names:
            names += " lavapipe"  # the driver's name; llvmpipe is its renderer
        return word.lower() in names


def driver_environment(driver_file: str) -> dict[str, str]:
    """Return the environment variables under which a process sees the adapters of one driver alone."""
    # Some drivers do not start without a folder for the user's sockets, which a service does not have.
    folder = os.environ.get("XDG_RUNTIME_DIR", "/tmp")  # noqa: S108 - nothing is written there
    return {"VK_DRIVER_FILES": driver_file, "VK_ICD_FILENAMES": driver_file, "XDG_RUNTIME_DIR": folder}


def driver_files() -> list[Path]:
    """Return the driver manifests that Vulkan's loader finds, then those in known folders that it does not search."""
    for variable in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        if os.environ.get(variable):
            chosen = [Path(text) for text in os.environ[variable].split(":") if text]
            return [*chosen, *(p for p in map(Path, _MORE_FILES) if p.exists() and p not in chosen)]
    home = Path(os.environ.get("XDG_DATA_HOME") or Path("~/.local/share").expanduser())
    data = (os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(":")
    found: dict[Path, None] = {}
    for folder in (Path("/etc"), home, *(Path(text) for text in data if text)):
        with suppress(OSError):
            found |= dict.fromkeys(sorted((folder / "vulkan" / "icd.d").glob("*.json")))
    return [*found, *(p for p in map(Path, _MORE_FILES) if p.exists() and p not in found)]


def find_adapters(*, software: bool) -> tuple[Adapter, ...]:
    """Return the adapters of this machine, discrete ones first; with ``software``, software adapters come last.

    Drivers that crash, hang or find nothing are left out. Adapters with the same name and driver are listed once,
    because they cannot be told apart.
    """
    files = [path for path in driver_files() if software or not _is_software(path.name)]
    if not software and not any(any(Path("/dev").glob(pattern)) for pattern in _DEVICES):
        return ()
    with ThreadPoolExecutor(max(1, len(files))) as threads:
        found = [adapter for each in threads.map(_asked, files) for adapter in each]
    kept = {(a.name, a.driver_file): a for a in found if software or a.kind != "software"}
    order = ("discrete", "integrated", "virtual", "other", "software")
    return tuple(sorted(kept.values(), key=lambda a: order.index(a.kind)))


def _asked(file: Path) -> list[Adapter]:
    """Query one driver in a separate process; return no adapters where it fails."""
    command = [sys.executable, "-I", str(Path(__file__).resolve()), str(file)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        return [Adapter(**entry) for entry in json.loads(run.stdout)]
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        return []


def _is_software(name: str) -> bool:
    return any(word in name.lower() for word in _SOFTWARE_WORDS)


def vulkan_loader(driver_file: str = "") -> ctypes.CDLL | None:
    """Return Vulkan's loader: the system's, else one beside the driver file, else None."""
    for name in ("libvulkan.so.1", str(Path(driver_file).parent / "libvulkan.so.1")):
        with suppress(OSError):
            return ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
    return None


def vulkan_version() -> str | None:
    """Return the version of Vulkan's loader, queried in a separate process, or None where there is no loader."""
    program = "import ctypes; v = ctypes.c_uint32(); "
    program += "ctypes.CDLL('libvulkan.so.1').vkEnumerateInstanceVersion(ctypes.byref(v)); print(v.value)"
    try:
        run = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, timeout=_LIMIT_S, check=True)
        return _version(int(run.stdout))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


class _InstanceInfo(ctypes.Structure):
    # VkInstanceCreateInfo; only the structure type (1) is set.
    _fields_ = (("kind", c_int32), ("rest", c_uint64 * 7))


class _Properties(ctypes.Structure):
    # The first fields of VkPhysicalDeviceProperties; ``rest`` has room for the limits that follow.
    _fields_ = (
        *((name, c_uint32) for name in ("api_version", "driver_version", "vendor", "device")),
        ("kind", c_int32),
        ("name", ctypes.c_char * 256),
        ("rest", ctypes.c_char * 2048),
    )


def _ask(driver_file: str) -> list[dict[str, Any]]:
    os.environ.update(driver_environment(driver_file))
    vulkan = vulkan_loader(driver_file)
    if vulkan is None:
        return []
    instance = c_void_p()
    if vulkan.vkCreateInstance(ctypes.byref(_InstanceInfo(kind=1)), None, ctypes.byref(instance)):
        return []
    count = c_uint32()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
    devices = (c_void_p * count.value)()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), devices)
    found = []
    for device in devices[: count.value]:
        properties = _Properties()
        vulkan.vkGetPhysicalDeviceProperties(c_void_p(device), ctypes.byref(properties))
        kind = _KINDS[properties.kind] if 0 <= properties.kind < len(_KINDS) else "other"
        found.append(
            {
                "name": c_char_p(properties.name).value.decode(errors="replace"),  # type: ignore[union-attr]
                "kind": kind,
                "driver_file": driver_file,
                "driver_version": _version(properties.driver_version, nvidia=properties.vendor == 0x10DE),
                "api_version": _version(properties.api_version),
            }
        )
    return found


def _version(packed: int, *, nvidia: bool = False) -> str:
    if nvidia:  # 10, 8, 8 and 6 bits instead of Vulkan's 7, 10 and 12
        return f"{packed >> 22}.{packed >> 14 & 0xFF:02}.{packed >> 6 & 0xFF:02}"
    return f"{packed >> 22 & 0x7F}.{packed >> 12 & 0x3FF}.{packed & 0xFFF}"


if __name__ == "__main__":
    answer = os.dup(1)
    os.dup2(2, 1)  # a driver may print
    os.write(answer, json.dumps(_ask(sys.argv[1])).encode())

# Runs a plan on a board that is reached by SSH: sh by_ssh.sh HOST FOLDER
# The board needs a shell, tar, and a Python with numpy and ai-edge-litert: python3, or what BOARD_PYTHON names, as
# BOARD_PYTHON=venv/bin/python. Log in once by hand before, with a key.
set -e
there=$(tar -C "$2" -cf - . | ssh "$1" 'folder=$(mktemp -d) && tar -C "$folder" -xf - && echo "$folder"')
ssh "$1" "cat > '$there/board.py'" <"$(dirname "$0")/board.py"
exec ssh "$1" "${BOARD_PYTHON:-python3} '$there/board.py' '$there'; rm -r '$there'"

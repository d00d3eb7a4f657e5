#!/system/bin/sh
# Runs the plan of this folder on the phone: sh run.sh [RUNS [INPUTS OUTPUTS]]
case $0 in */*) cd "${0%/*}" || exit 1 ;; esac
for file in run_plan libLiteRt.so; do
  if [ ! -f "$file" ]; then
    echo "run.sh: $file is missing: build it as the head of CMakeLists.txt says, and push the folder again" >&2
    exit 4
  fi
done
chmod +x run_plan
loader=glibc/ld-linux-aarch64.so.1 # of a runner that was built for Linux
if [ -f "$loader" ]; then
  chmod +x "$loader"
  exec "./$loader" --library-path glibc:. ./run_plan . "$@"
fi
LD_LIBRARY_PATH=".:$LD_LIBRARY_PATH" exec ./run_plan . "$@"

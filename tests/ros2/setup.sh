#!/bin/bash
# setup.sh VENV PYTHON: a virtual environment with ROS 2 Jazzy's rclpy, Fast DDS and our messages,
# from wheels of PyPI (x86-64, CPython 3.10 to 3.13). Needs cmake and g++.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd); root=$here/../..
mkdir -p "$(dirname "$1")"; venv=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
made=$venv/made-$(sha256sum < "$here/requirements.txt" | cut -c 1-16)
python=$venv/bin/python
if [ ! -e "$made" ]; then
    "$2" -m venv --clear "$venv"
    "$venv/bin/pip" --disable-pip-version-check install -q -r "$here/requirements.txt"
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
    numpy=$("$python" -c 'import numpy; print(numpy.get_include())')
    # The wheels' CMake files name paths of the machine that built them.
    grep -rlE '/opt/python/cp3' "$venv/share" --include='*.cmake' | xargs -r sed -i -E \
        "s#/opt/python/cp[0-9]+-cp[0-9]+/include/python3\.[0-9]+#$include#g; \
         s#/opt/python/cp[0-9]+-cp[0-9]+/lib/python3\.[0-9]+/site-packages/numpy/_core/include#$numpy#g"
    touch "$made"
fi
export PATH=$venv/bin:$PATH AMENT_PREFIX_PATH=$venv
cmake -S "$root/serving/ros2/thor_dflash_msgs" -B "$venv/build" -DCMAKE_INSTALL_PREFIX="$venv" \
    -DCMAKE_PREFIX_PATH="$venv" -DPython3_EXECUTABLE="$python" -DPython3_FIND_VIRTUALENV=ONLY \
    -DBUILD_TESTING=OFF > "$venv/build.log"
cmake --build "$venv/build" -j2 >> "$venv/build.log"
cmake --install "$venv/build" >> "$venv/build.log"

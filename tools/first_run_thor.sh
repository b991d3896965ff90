#!/usr/bin/env bash
# The first run on a Jetson Thor: steps 3 to 6 of docs/guide/thor.md, on a board that is set up.
#
#   tools/first_run_thor.sh [--work DIR] [--target DIR --drafter DIR] [--golden-nano FILE] [--golden FILE]
#
# Run it in a checkout, in the environment of step 2. Steps that are done are kept in the work
# directory (default: first-run); run again, it goes on with the step that failed or was stopped.
# Without --target, the small model alone. At the end, also after a failure, first-run.tar.gz in the
# work directory holds what to send back. It reads the board's settings and changes none.
# Exit status: 0 all done, 1 a step failed, 2 wrong options.
#
# Unverified: it was run with a stand-in for thor-dflash, never on a Thor.

set -uo pipefail

refuse() { echo "first_run_thor: $1" >&2; exit 2; }

work=first-run target="" drafter="" golden="" golden_nano=""
while (($#)); do
    case "$1" in
        --work | --target | --drafter | --golden | --golden-nano)
            (($# > 1)) || refuse "$1 must have a value (got none)"
            name=${1#--}
            printf -v "${name/-/_}" %s "$2"
            shift 2
            ;;
        *) refuse "an option must be one of --work, --target, --drafter, --golden, --golden-nano (got $1)" ;;
    esac
done
[[ -n $target && -z $drafter || -z $target && -n $drafter ]] && refuse "--target and --drafter must be given together"
for one in ${target:+"$target"} ${drafter:+"$drafter"}; do
    [[ -f $one/config.json ]] || refuse "a checkpoint must have a config.json (got none in $one)"
done
for one in ${golden:+"$golden"} ${golden_nano:+"$golden_nano"}; do
    [[ -f $one ]] || refuse "a golden file must be there (got $one)"
done
[[ -d models/planner-nano ]] || refuse "the current directory must be a checkout (got $PWD)"
command -v thor-dflash >/dev/null || refuse "thor-dflash must be installed: step 2 (got no such command)"
mkdir -p "$work/done" "$work/send" || exit 2

# Facts of the board and its load, for the whole run; `|| true`: what is missing is not fatal.
{
    date -u
    git rev-parse HEAD
    cat /etc/nv_tegra_release
    nvpmodel -q
    free -m
    pip freeze
} >"$work/send/facts.txt" 2>&1 || true
load=""
if command -v tegrastats >/dev/null; then
    tegrastats --interval 5000 >>"$work/send/tegrastats.txt" 2>&1 &
    load=$!
fi

pack() {
    [[ -n $load ]] && kill "$load" 2>/dev/null
    for log in "$work"/*/tensorrt.log; do
        [[ -f $log ]] && cp "$log" "$work/send/$(basename "$(dirname "$log")")-tensorrt.log"
    done
    tar -czf "$work/first-run.tar.gz" -C "$work" send && echo "to send back: $work/first-run.tar.gz"
}
trap pack EXIT
trap 'exit 130' INT TERM

# step NAME COMMAND...: runs a command once. Its output goes to send/NAME.txt, or, if the command
# prints JSON, to send/NAME.json, and its messages to the terminal and to send/NAME.log.
step() {
    local name=$1 out="$work/send/$1.txt" begun=$SECONDS status
    shift
    [[ -e $work/done/$name ]] && return
    [[ " $* " == *" --json "* ]] && out="$work/send/$name.json"
    echo "== $name: $*"
    "$@" >"$out" 2> >(tee "$work/send/$name.log" >&2)
    status=$?
    if ((status)); then
        echo "first_run_thor: $name failed with status $status after $((SECONDS - begun)) s; mend it and run this again" >&2
        exit 1
    fi
    echo "$((SECONDS - begun)) s" | tee "$work/done/$name"
}

# build NAME ARGUMENTS...: builds a package, unless an earlier run has. An interrupted build resumes.
build() {
    local name=$1
    shift
    [[ -f $work/$name/manifest.toml ]] || step "build-$name" thor-dflash build --out "$work/$name" "$@"
    step "doctor-$name" thor-dflash doctor --package "$work/$name"
}

nano=(--target models/planner-nano/target --drafter models/planner-nano/drafter)
task=$(cat docs/examples/task.txt)
cup="Put the red cup on the shelf."

step doctor thor-dflash doctor --json
build nano --engine cuda "${nano[@]}" -s build.capacity=1024
step check-nano thor-dflash check --package "$work/nano" --json
step generate-nano thor-dflash generate --package "$work/nano" --prompt "$task" --max-tokens 512 --json
[[ -n $golden_nano ]] && step golden-nano thor-dflash check --package "$work/nano" --golden "$golden_nano" --json

build nano-trt --engine tensorrt "${nano[@]}" -s build.capacity=1024
[[ -n $golden_nano ]] && step golden-nano-trt thor-dflash check --package "$work/nano-trt" --golden "$golden_nano" --json
step generate-nano-trt thor-dflash generate --package "$work/nano-trt" --prompt "$task" --max-tokens 512 --json

step bench thor-dflash bench --shape qwen3.6-27b --random-weights --engine cuda --json
if [[ -n $target ]]; then
    build planner --engine cuda --target "$target" --drafter "$drafter"
    [[ -n $golden ]] && step golden thor-dflash check --package "$work/planner" --operators none --golden "$golden" --json
    step answer thor-dflash generate --package "$work/planner" --prompt "$cup" --json
    step profile thor-dflash profile --package "$work/planner" --prompt "$cup" --html "$work/send/profile.html" --json
    step tune thor-dflash tune --package "$work/planner" --json
    step profile-tuned thor-dflash profile --package "$work/planner" --prompt "$cup" --json
    step soak thor-dflash profile --package "$work/planner" --prompt "$cup" --soak 600 --html "$work/send/soak.html" --json
    build planner-trt --engine tensorrt --target "$target" --drafter "$drafter"
    [[ -n $golden ]] && step golden-trt thor-dflash check --package "$work/planner-trt" --operators none --golden "$golden" --json
    step answer-trt thor-dflash generate --package "$work/planner-trt" --prompt "$cup" --json
    step profile-trt thor-dflash profile --package "$work/planner-trt" --prompt "$cup" --json
fi
exit 0

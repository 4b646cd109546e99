#!/usr/bin/env bash
# A study, learning rate x depth x seed x arm, from a bare clone to its figures.
# Written for bash 3.2 and the BSD userland, which is what macOS ships.
# shellcheck disable=SC2317    # xargs and a trap call functions that shellcheck thinks out of reach
set -euo pipefail
export LC_ALL=C    # a dot in every number, whatever the user's locale
unset CDPATH

usage() {
    cat << 'END'
usage: bash sweep.sh [quick|cpu|paper] [option]        (default: paper)

  quick    toy corpus, minutes on two CPU cores, no network
  cpu      tinystories-5m, a 1M-parameter model, hours on two CPU cores
  paper    tinystories, 10 to 15M parameters: a MacBook, a GPU or a cluster

  --list       print the command of every cell, one a line (to be run in this folder), and do nothing else
  --dry-run    install and prepare what is missing; print the plan and the time it would take here
  --cell N     run the N-th command of --list alone; a Slurm array task does so by itself
  --help       print this text

environment:
  LRS DEPTHS SEEDS MAX_ITERS DEVICE    another grid, length or device, e.g. SEEDS="1337 1338"; needs STUDY
  ARGS=flags     more flags of qkgpt.py for every cell, e.g. ARGS="--warmup_ratio 0.05"; needs STUDY
  STUDY=name     keep the logs in logs/name; a larger grid under a name that is there extends that study
  JOBS=n         cells at once, sharing the cores (default: one a core on the CPU; 1 elsewhere and for --cell)
  PYTHON=path    the Python to use, 3.11 or newer

A stopped sweep goes on with the same command: finished cells are kept, a cut one starts again.
To watch a cell at work: tail -f logs/<study>/*.partial
END
}

fail() {
    local message=$*
    printf 'sweep.sh: %s\n' "${message//$'\n'/ }" >&2
    exit 2
}

# ---- the grid -------------------------------------------------------------------------------------------

define_study() {
    lrs="3e-4 5.5e-4 1e-3 1.7e-3 3e-3 5.5e-3 1e-2 1.7e-2 3e-2 5.5e-2 1e-1 1.7e-1 3e-1"
    case $study in
        quick)
            args="--dataset toy --n_embd 64 --n_head 2 --block_size 64 --batch_size 16 --eval_interval 30"
            max_iters=300 lrs="1e-3 1e-2 3e-2 1e-1 3e-1" depths="2 4" n_seeds=2 ;;
        cpu)
            args="--dataset tinystories-5m --n_embd 128 --n_head 4 --block_size 128 --batch_size 16"
            args="$args --eval_interval 50"
            max_iters=500 depths="2 4 8" n_seeds=3 ;;
        paper)
            args="--dataset tinystories"    # the model and the batch are qkgpt.py's defaults
            max_iters=1000 depths="6 8 10" n_seeds=3 ;;
    esac
}

apply_environment() {
    local changed=${LRS+LRS }${DEPTHS+DEPTHS }${SEEDS+SEEDS }${MAX_ITERS+MAX_ITERS }
    changed=$changed${DEVICE+DEVICE }${ARGS+ARGS }
    if [ -n "$changed" ] && [ -z "${STUDY:-}" ]; then
        fail "${changed% } would change the study $study: give the new study a name, STUDY=name"
    fi
    study=${STUDY:-$study}
    [[ $study =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail "STUDY: '$study' is not letters, digits, . _ -"
    dir=logs/$study

    local number='^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$' positive='^[1-9][0-9]{0,8}$'
    lrs=$(checked LRS "$number" "a positive number" "${LRS-$lrs}")
    depths=$(checked DEPTHS "$positive" "a positive integer" "${DEPTHS-$depths}")
    [ -n "${SEEDS+set}" ] || read_seeds
    seeds=$(checked SEEDS '^(0|[1-9][0-9]{0,17})$' "a non-negative integer" "${SEEDS-$seeds}")
    max_iters=${MAX_ITERS:-$max_iters}
    [[ $max_iters =~ $positive ]] || fail "MAX_ITERS: '$max_iters' is not a positive integer"
    [[ ${JOBS:-1} =~ $positive ]] || fail "JOBS: '$JOBS' is not a positive integer"
    [[ ${SLURM_CPUS_ON_NODE:-1} =~ $positive ]] ||
        fail "SLURM_CPUS_ON_NODE: '$SLURM_CPUS_ON_NODE' is not a positive integer"
    check_flags "${ARGS:-}"
    args="$args --max_iters $max_iters${ARGS:+ $ARGS}"
    device=${DEVICE:-auto}
}

check_flags() {    # qkgpt.py checks names and values
    local flags='^(--[a-z][a-z0-9_]*[ =][A-Za-z0-9./][A-Za-z0-9._/+-]*( |$))*$'
    local ours='qknorm|n_layer|lr|seed|max_iters|device|threads|out_dir|overwrite|prepare|dry_run|selftest'
    [[ $1 =~ $flags ]] || fail "ARGS: '$1' is not a list of flags with plain values, one space between words"
    [[ ! $1 =~ --($ours)[\ =] ]] || fail "ARGS: '$1': --${BASH_REMATCH[1]} is set by the sweep"
}

# checked NAME PATTERN WHAT VALUES: the values, learning rates in the form that they have in the logs' names.
checked() (
    set -f    # a * is an error, not a list of files
    seen=
    for value in $4; do
        [[ $value =~ $2 ]] || fail "$1: '$value' is not $3"
        [ "$1" != LRS ] || value=$(printf '%g' "$value")
        [ "$1 $value" != "LRS 0" ] || fail "$1: 0 is not $3"
        case "$seen " in *" $value "*) fail "$1: $value is given twice" ;; esac
        seen="$seen $value"
    done
    [ -n "$seen" ] || fail "$1 is empty, and so is the grid"
    echo "${seen# }"
)

read_seeds() {    # the first n_seeds of seeds.txt, whatever its line ends
    local text line seed rest number=0
    text=$(cat seeds.txt 2> /dev/null) || fail "seeds.txt is not a file that can be read"
    text=${text//$'\r\n'/$'\n'}
    text=${text//$'\r'/$'\n'}
    seeds=
    while IFS= read -r line; do
        number=$((number + 1))
        read -r seed rest <<< "${line%%#*}"
        [[ -z $rest && $seed =~ ^[0-9]*$ ]] || fail "seeds.txt, line $number: '$line' is not one seed"
        seeds="$seeds $seed"
    done <<< "$text"
    # shellcheck disable=SC2086    # a word a seed
    seeds=$(printf '%s ' $seeds | cut -d ' ' -f "1-$n_seeds")
    [[ $seeds = *[0-9]* ]] || fail "seeds.txt holds no seed"
}

# The cells, one a line: run seed depth lr arm. Seeds outermost and arms innermost, so that a stopped sweep
# holds whole pairs, and heat or battery slow both arms alike.
cells() {
    local seed depth lr arm
    for seed in $seeds; do for depth in $depths; do for lr in $lrs; do for arm in 0 1; do
        echo "L${depth}_lr${lr}_qk${arm}_s$seed $seed $depth $lr $arm"
    done; done; done; done
}

unfinished() {    # the cells without a complete log; `unfinished err` leaves out the failed ones too
    local run rest
    cells | while read -r run rest; do
        [ -e "$dir/$run.csv" ] || [ -e "$dir/$run.${1:-csv}" ] || echo "$run $rest"
    done
}

count() {
    echo $(($(wc -l)))    # BSD's wc pads with blanks
}

cell_args() {    # cell_args run seed depth lr arm
    echo "qkgpt.py $args --n_layer $3 --lr $4 --qknorm $5 --seed $2" \
        "--device $device --threads $threads --out_dir $dir"
}

# ---- from nothing to a plan -----------------------------------------------------------------------------

probe='
import importlib.metadata as metadata, sys
if sys.version_info < (3, 11):
    sys.exit(1)
try:
    [metadata.version(name) for name in ("torch", "numpy", "tiktoken", "matplotlib")]
    print("ready")
except metadata.PackageNotFoundError:
    print("bare")
'

# Sets python to the first that has the packages, else to the one of the .venv that base will make.
find_python() {
    local state candidates="python3 python python3.14 python3.13 python3.12 python3.11"
    base=
    if [ -n "${PYTHON:-}" ]; then
        state=$("$PYTHON" -c "$probe" 2> /dev/null) || state=
        [ -n "$state" ] || fail "PYTHON: '$PYTHON' is not Python 3.11 or newer"
        python=$PYTHON base=$PYTHON candidates=
        [ "$state" != ready ] || return 0
    fi
    for python in .venv/bin/python $candidates; do
        state=$("$python" -c "$probe" 2> /dev/null) || continue
        [ "$state" != ready ] || return 0
        base=${base:-$python}
    done
    [ -n "$base" ] || fail "no Python 3.11 or newer: install one" \
        "(brew install python@3.13, apt install python3-venv, python.org) or set PYTHON"
    python=.venv/bin/python
}

installed() {
    [ "$("$python" -c "$probe" 2> /dev/null)" = ready ]
}

install() {
    echo "installing requirements.txt into .venv with $base"
    "$base" -m venv .venv
    "$python" -m pip install --disable-pip-version-check -r requirements.txt
    installed || fail "requirements.txt does not bring all packages"
}

# One process at a time sets up. The system drops the lock with the last process that holds it.
lock() {
    [ -w requirements.txt ] || fail "requirements.txt cannot be locked: $PWD should be writable"
    exec 9>> requirements.txt    # opened for its lock alone, never written
    "${base:-$python}" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}

setup() {
    local words prepared
    if [ ! -e "$dir/plan.txt" ] || ! installed; then lock; fi
    installed || install
    read -r -a words <<< "$args --device $device"
    prepared=$("$python" qkgpt.py --prepare 1 "${words[@]}")
    code=$(sed -n 's/^code //p' <<< "$prepared")
    data=$(sed -n 's/^data //p' <<< "$prepared")
    device=$(sed -n 's/^device //p' <<< "$prepared")
    share_cores
    check_plan
}

plan() {
    printf '%s\n' "study $study" "lrs $lrs" "depths $depths" "seeds $seeds" "arms 0 1" \
        "args $args" "device $device" "threads $threads" "code $code" "data $data"
}

# A study has one code, data, device and settings: a second start may add cells to its grid, and nothing else.
check_plan() {
    local key value kept
    [ -e "$dir/plan.txt" ] || return 0
    ! plan | cmp -s - "$dir/plan.txt" || return 0
    plan | diff -u "$dir/plan.txt" - | grep '^[-+][a-z]' >&2 || true    # diff's status is 1
    while read -r key value; do
        kept=$(sed -n "s/^$key //p" "$dir/plan.txt")
        case $key in
            lrs | depths | seeds) contains "$value" "$kept" ;;
            *) [ "$kept" = "$value" ] ;;
        esac || fail "$dir/plan.txt (-) is not this start's plan (+): go back to it, or give a new STUDY=name"
    done <<< "$(plan)"
    echo "the grid of $dir/plan.txt is extended as above"
}

contains() {    # contains "a b c" "b c": every word of the second, which is one line, is one of the first
    local word
    [[ -n $2 && $2 != *$'\n'* ]] || return 1
    for word in $2; do
        case " $1 " in *" $word "*) ;; *) return 1 ;; esac
    done
}

keep_plan() {    # a plan that is kept off the CPU also says that its code passed the self-test on its device
    local words
    if [ ! -e "$dir/plan.txt" ] && [ "$device" != cpu ]; then
        read -r -a words <<< "$args --n_layer ${depths##* } --device $device"
        "$python" qkgpt.py --selftest 1 "${words[@]}"
    fi
    mkdir -p "$dir" 2> /dev/null || true
    [[ -d $dir && -w $dir ]] || fail "$dir is not a folder that can be written"
    if ! plan | cmp -s - "$dir/plan.txt"; then    # cells may start together: only the first one writes
        plan > "$dir/plan.txt.new"
        mv "$dir/plan.txt.new" "$dir/plan.txt"
    fi
    exec 9>&-    # others may set up now
}

share_cores() {
    local cores
    cores=$({ getconf _NPROCESSORS_ONLN || sysctl -n hw.ncpu || echo 1; } 2> /dev/null)
    cores=${SLURM_CPUS_ON_NODE:-$cores}
    case $device in
        cpu | auto) jobs=${JOBS:-$cores} ;;
        *) jobs=${JOBS:-1} ;;
    esac
    threads=$((jobs < cores ? cores / jobs : 1))
    if [ -e "$dir/plan.txt" ]; then    # the number of threads decides the last digits: one for all of a study
        [ -f "$dir/plan.txt" ] || fail "$dir/plan.txt is not a file"
        threads=$(sed -n 's/^threads //p' "$dir/plan.txt" | grep . || echo "$threads")
        [[ $threads =~ ^[1-9][0-9]{0,3}$ ]] || fail "$dir/plan.txt: threads '$threads' is no count"
    fi
}

# ---- time -----------------------------------------------------------------------------------------------

finished_times() (    # `took depth seconds` for every complete log
    shopt -s nullglob
    awk '/^# .*"wall_s":/ {
        depth = FILENAME
        sub(/.*\/L/, "", depth)
        sub(/.*"wall_s": */, "")
        print "took", depth + 0, $0 + 0
    }' /dev/null "$dir"/L*.csv
)

measured_times() {    # the same from a few timed steps at each depth
    local depth words
    for depth in $depths; do
        read -r -a words <<< "$(cell_args - "${seeds%% *}" "$depth" "${lrs%% *}" 1)"
        "$python" "${words[@]}" --dry_run 1 | tail -n 1 |
            sed "s/.*\"estimated_s\": *\([0-9.]*\).*/took $depth \1/" || return
    done
}

# Reads cells to do and times taken. A depth without a time is reckoned by the layer from the others.
time_left() {
    awk -v jobs="$jobs" '
        /^L/    { todo[$3]++ }
        /^took/ { n[$2]++; took[$2] += $3; all += $3; layers += $2 }
        END {
            for (depth in todo) {
                if (!all) { print "unknown"; exit }
                left += todo[depth] * (depth in n ? took[depth] / n[depth] : depth * all / layers)
            }
            left /= jobs
            if (left >= 3600) printf "%dh%02dm\n", left / 3600, left % 3600 / 60
            else if (left >= 60) printf "%dm%02ds\n", left / 60, left % 60
            else printf "%ds\n", left
        }'
}

print_plan() {    # print_plan TIMES: what cells take, as the functions above print it
    local total todo
    total=$(cells | count)
    todo=$(unfinished | count)
    plan
    echo "$total cells, $((total - todo)) done, $todo to do, $jobs at once with threads: $threads, in $dir"
    echo "time left: $({ unfinished; echo "$1"; } | time_left)"
}

# ---- the cells ------------------------------------------------------------------------------------------

footer() {    # footer RUN KEY: a value from the last line of its log
    tail -n 1 "$dir/$1.csv" | sed "s/.*\"$2\": *\"\{0,1\}\([^\",}]*\).*/\1/"
}

outcome() {
    if [ "$(footer "$1" status)" = ok ]; then
        printf 'ok val %.3f %.0f s' "$(footer "$1" final_val_loss)" "$(footer "$1" wall_s)"
    else
        printf 'diverged at step %s %.0f s' "$(footer "$1" diverged_step)" "$(footer "$1" wall_s)"
    fi
}

run_cell() {    # run_cell run seed depth lr arm
    local words output status=0 told total pending
    [ ! -e "$dir/$1.csv" ] || return 0
    read -r -a words <<< "$(cell_args "$@")"
    output=$("$python" "${words[@]}" 2>&1 | tr -d '\000') || status=$?    # a story of bytes may hold a NUL
    if [ -e "$dir/$1.csv" ]; then
        told=$(outcome "$1")
    elif [ "$status" -eq 3 ]; then
        return 0    # another sweep is at it
    else
        [ "$status" -le 128 ] || output="$output"$'\n'"killed by signal $((status - 128))"
        : > "$dir/$1.err"
        printf '%s\n' "$output" 2> /dev/null > "$dir/$1.err" || true    # a full disk: the line below tells
        told="FAILED with exit status $status: $(tail -n 1 <<< "$output")"
    fi
    total=$(cells | count)
    pending=$(unfinished err)
    echo "[$((total - $(grep -c . <<< "$pending")))/$total," \
        "eta $({ echo "$pending"; finished_times; } | time_left)] $1 $told"
}

# The cells run in a process group of their own, so that they can be killed together: by stop, or by the watch
# when the sweep is gone, kill -9 included (a zombie, too, has lost its children). A killed cell leaves only a
# partial log.
watch='
import os, signal, sys, time
sweep, cells = os.getppid(), int(sys.argv[1])
try:
    while os.getppid() == sweep:
        os.killpg(cells, 0)
        time.sleep(1)
    os.killpg(cells, signal.SIGKILL)
except ProcessLookupError:
    pass  # no cell is left
'

run_cells() {
    local todo
    todo=$(unfinished err)
    [ -n "$todo" ] || return 0
    set -m
    # shellcheck disable=SC2016    # "$@" is the inner shell's
    xargs -n 5 -P "$jobs" "$BASH" -euo pipefail -c 'run_cell "$@"' run_cell <<< "$todo" &
    group=$!
    "$python" -c "$watch" "$group" > /dev/null 2>&1 &
    set +m
    if ! wait "$group"; then
        echo "sweep.sh: the cells were stopped from outside" >&2
        exit 1
    fi
}

stop() {
    trap '' INT TERM HUP
    kill -KILL -- "-$group" 2> /dev/null || true
    echo "stopped; the same command goes on from here" >&2
    exit 130
}

run_grid() {
    export dir lrs depths seeds args device python jobs threads
    export -f cells unfinished count cell_args finished_times time_left footer outcome run_cell
    rm -f "$dir"/L*.err
    group=
    trap stop INT TERM HUP
    run_cells
    [ -z "$(unfinished err)" ] || echo "waiting for cells of another sweep: $(unfinished err | count)"
    while [ -n "$(unfinished err)" ]; do
        sleep 5
        run_cells
    done
    trap - INT TERM HUP
}

report() {
    local file status=0
    "$python" analyze.py "$dir" || status=1
    for file in "$dir"/L*.err; do
        [ -e "$file" ] || continue
        echo "failed: $file: $(tail -n 1 "$file" | grep . || echo "a full disk? its line above tells")" >&2
        status=1
    done
    return "$status"
}

# ---- the command line -----------------------------------------------------------------------------------

go_to_project() {    # Slurm runs a copy of this script from its spool folder
    local folder
    for folder in "$(dirname -- "$0")" "${SLURM_SUBMIT_DIR:-.}" .; do
        [ ! -e "$folder/qkgpt.py" ] || break
    done
    cd -- "$folder"
    [ -e qkgpt.py ] || fail "no qkgpt.py in $PWD: start it in the project's folder"
}

list() {
    local line
    share_cores
    cells | while read -r line; do
        # shellcheck disable=SC2086    # a cell is five words
        printf '%q %s\n' "$python" "$(cell_args $line)"
    done
}

one_cell() {    # one_cell N
    local line words
    line=$(cells | awk -v n="$1" 'NR == n')
    [ -n "$line" ] || fail "cell '$1': the cells of $study are numbered 1 to $(cells | count)"
    JOBS=${JOBS:-1}
    setup
    keep_plan
    if [ -e "$dir/${line%% *}.csv" ]; then
        echo "${line%% *} is already complete"
        return
    fi
    # shellcheck disable=SC2086    # a cell is five words
    read -r -a words <<< "$(cell_args $line)"
    exec "$python" "${words[@]}"
}

sweep() {
    if command -v caffeinate > /dev/null; then
        caffeinate -ims -w $$ > /dev/null 2>&1 &    # the Mac stays awake as long as this process lives
    fi
    setup
    keep_plan
    print_plan "$(finished_times)"
    run_grid
    report
}

dry_run() {
    local times
    setup
    times=$(measured_times)
    print_plan "$times"
}

main() {
    local action=sweep cell=
    study=
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
        action=one_cell cell=$SLURM_ARRAY_TASK_ID
    fi
    while [ $# -gt 0 ]; do
        case $1 in
            quick | cpu | paper)
                [ -z "$study" ] || fail "two studies, $study and $1: one at a time"
                study=$1 ;;
            --list) action=list ;;
            --dry-run) action=dry_run ;;
            --cell)
                [ $# -gt 1 ] || fail "--cell: its number is missing"
                action=one_cell cell=$2
                shift ;;
            -h | --help) usage; exit ;;
            *) fail "'$1': expected quick, cpu or paper, or an option (see --help)" ;;
        esac
        shift
    done
    study=${study:-paper}
    go_to_project
    define_study
    apply_environment
    find_python
    "$action" "$cell"
}

main "$@"
exit    # bash reads no further, should this file be edited during a run

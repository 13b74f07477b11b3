# What .ci/run and .ci/nightly share: tools, steps with their minutes, and the summary at the end.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

# A skipped test fails, unless tests/kits/skip_policy.py or SWARM_MAY_SKIP allows its reason.
export CI="${CI:-true}"
# Two cores are shared by several processes of each test; more threads would only compete.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

steps=()
failed=()
warnings=()

warn() {
    warnings+=("$1")
    echo "ci: warning: $1" >&2
}

# step NAME COMMAND...: run it, record its minutes, and continue after a failure.
step() {
    local name=$1 began=$SECONDS result=ok
    shift
    echo "ci: $name"
    "$@" || { result=FAILED && failed+=("$name"); }
    steps+=("$(printf '%6.1f min  %-6s  %s' "$(((SECONDS - began) * 10 / 60))e-1" "$result" "$name")")
}

# tool NAME SCRIPT: install what the tests named NAME need. They may skip only on a machine that
# cannot have it: one without root or apt-get.
tool() {
    sh "tools/install_$2.sh" && return
    if ((EUID == 0)) && command -v apt-get >/dev/null; then
        failed+=("tools/install_$2.sh")
    else
        export SWARM_MAY_SKIP="${SWARM_MAY_SKIP:+$SWARM_MAY_SKIP,}$1"
        warn "this machine cannot have '$1' (no root or no apt-get): its tests are skipped"
    fi
}

# Python, make and the virtual environment. Without these nothing runs.
prepare() {
    local missing=()
    command -v make >/dev/null || missing+=(make)
    if ! command -v python3 >/dev/null; then
        missing+=(python3 python3-venv)
    elif ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
        missing+=(python3-venv)
    fi
    if ((${#missing[@]})); then
        if ((EUID == 0)) && command -v apt-get >/dev/null; then
            apt-get update -qq
            DEBIAN_FRONTEND=noninteractive \
                apt-get install -y -qq --no-install-recommends "${missing[@]}"
        else
            echo "ci: install first: ${missing[*]}" >&2
            exit 1
        fi
    fi
    rm -rf build/junit
    make setup-dev
}

# The tests that were skipped, each reason with its number; then minutes, warnings and failures.
summary() {
    echo
    .venv/bin/python - <<'EOF'
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

reasons = Counter(
    skipped.get("message", "")
    for file in Path("build/junit").glob("*.xml")
    for skipped in ElementTree.parse(file).iter("skipped")
)
for reason, count in reasons.most_common():
    print(f"ci: {count} skipped: {reason}")
EOF
    printf '%s\n' "${steps[@]}"
    printf '%6.1f min  in all\n' "$((SECONDS * 10 / 60))e-1"
    if ((${#warnings[@]})); then
        printf 'ci: warning: %s\n' "${warnings[@]}" >&2
    fi
    if ((${#failed[@]})); then
        printf 'ci: FAILED: %s\n' "${failed[@]}" >&2
        exit 1
    fi
}

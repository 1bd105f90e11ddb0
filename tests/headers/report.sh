# For scripts that check: skip, check and empty. Set W, the folder of their logs, first; it is emptied.

failures=0 lane=
rm -rf "$W" && mkdir -p "$W" || exit 1
W=$(cd "$W" && pwd)

skip() { printf 'skip  %s: %s\n' "$1" "$2"; }
# check "what" command...: the command's output is its reason
check() {
    what=$1 began=$(date +%s)
    shift
    if "$@" > "$W/log$lane" 2>&1; then
        took=$(($(date +%s) - began))
        if [ $took -gt 1 ]; then printf 'ok    %s, %d s\n' "$what" $took; else printf 'ok    %s\n' "$what"; fi
    else
        printf 'FAIL  %s\n' "$what"
        head -n 30 "$W/log$lane" | sed 's/^/        /'
        failures=$((failures + 1))
    fi
}
# empty command...: succeeds if the command prints nothing
empty() { out=$("$@" 2>&1); [ -z "$out" ] || { printf '%s\n' "$out"; return 1; }; }
works() { "$@" --version > /dev/null 2>&1; }

#!/bin/sh
# compile_commands.sh FILE...: a compilation database with the commands $C for C and $CXX for C++ files. The flags that
# the files $RESPONSES hold are written out.
C="$C $(cat $RESPONSES | tr '\n' ' ')"
comma=
echo '['
for file in "$@"; do
    case $file in *.cpp) command=$CXX ;; *) command=$C ;; esac
    printf '%s  {"directory": "%s", "file": "%s", "command": "%s -c %s"}' "$comma" "$PWD" "$file" "$command" "$file"
    comma=',
'
done
printf '\n]\n'

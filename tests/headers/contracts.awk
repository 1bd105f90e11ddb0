# Every function of the declaration half has a contract: a comment before it (one comment may serve a block of
# declarations) or behind it. One that takes a context speaks of stream and errors, one that returns a status of errors.
/Implementation ---/ { exit }
/^\/\*/ { comment = ""; inside = 1; fresh = 1 }
inside { comment = comment " " $0 }
inside && /\*\// { inside = 0; next }
inside { next }
/^[ \t]*$/ { fresh = 0; next }
/^GMMDEF/ {
    line = FNR
    text = $0
    while (text !~ /;/) { getline; text = text " " $0 }
    count++
    said = tolower(comment " " text)
    if (!fresh && text !~ /\/\*/) bad(line, text, "has no contract")
    if (text ~ /gmm_context \*/ && said !~ /stream/) bad(line, text, "says nothing about the stream")
    if ((text ~ /^GMMDEF gmm_status/ || text ~ /gmm_context \*/) && said !~ /errors/)
        bad(line, text, "says nothing about errors")
    next
}
{ fresh = 0 }
function bad(line, text, why) {
    sub(/^GMMDEF /, "", text)
    sub(/\(.*/, "", text)
    print FILENAME ":" line ": " text " " why
    failed = 1
}
END {
    if (!count) { print FILENAME ": no function found"; failed = 1 }
    exit failed
}

# Doxygen's view of a header (INPUT_FILTER of Doxyfile): the declarations, with their comments as Doxygen's.
#     the banner of a section      a topic
#     a comment above a blank      text of the topic
#     a comment above              of what follows, and of every function of a block of declarations
#     a comment behind             of what stands before it, and of each name there
#     an X-macro in an enum        its rows; the columns behind the value are their comments
# In a comment, "Errors:" and the other words of contracts begin a headed paragraph, and so does a word in a column of
# its own; indented lines are list items.

BEGIN {
    WORDS = "Aliasing|Alignment|Errors( \\(reason\\))?|Order|Range|Shapes|Stream, graph(, errors)?|Threads|dtypes"
    FUNCTION = "^(GMMDEF|GMM__HD|static inline)"
}

# Text as Doxygen reads it; names between backticks are code.
function escape(s) {
    gsub(/[\\@<>&#%]/, "\\\\&", s)
    gsub(/::/, "\\::", s)
    while (s ~ /`[^`]*`/) { sub(/`/, "<tt>", s); sub(/`/, "</tt>", s) }
    return s
}
function strip(s) { sub(/^ +/, "", s); sub(/ +$/, "", s); return s }

# "a. Errors: b" with each word of contracts as the heading of a paragraph.
function headings(s,    r, word) {
    r = ""
    while (match(s, "(^| )(" WORDS "):")) {
        word = strip(substr(s, RSTART, RLENGTH - 1))
        r = r substr(s, 1, RSTART - 1) "\n\n@par " word "\n"
        s = substr(s, RSTART + RLENGTH)
    }
    return r s
}

# Ends the block of `text` that is under way: a paragraph, a list item, or a paragraph headed by a word.
function flush(    s) {
    s = escape(block)
    if (kind == "item") text = text "@li " s "\n"
    else if (s != "") text = text headings(s) "\n"
    block = kind = ""
}
function begin(new, s) { flush(); kind = new; block = s }

# The text of a comment. Its second and later lines begin in column `base`.
function doxygen(comment, base,    i, n, indent, s, before, lines) {
    text = block = kind = before = ""
    n = split(comment, lines, "\n")
    for (i = 1; i <= n; i++) {
        s = strip(lines[i])
        match(lines[i], /^ */)
        indent = i > 1 ? RLENGTH - base : 0
        if (s == "") flush()
        else if (indent < 4) {
            if (s ~ /^[A-Za-z][A-Za-z0-9=]*( [a-z0-9=]+)*   *[A-Za-z`]/ && match(s, /   */) && RSTART < 15) {
                flush()
                text = text "\n@par " substr(s, 1, RSTART - 1) "\n"
                begin("column", substr(s, RSTART + RLENGTH))
            } else if (kind == "item") { flush(); text = text "\n"; begin("text", s) }
            else { if (kind == "") kind = "text"; block = strip(block " " s) }
        } else if (kind == "column" || (kind == "item" && indent > item) ||
                   (kind == "text" && before !~ /:$/ && block ~ ("(^| )(" WORDS "):"))) block = block " " s
        else {
            item = indent
            if (s !~ /[.,;:] /) sub(/  +/, ": ", s)
            else if (match(s, /  +/) && substr(s, 1, RSTART) !~ /[ .,;:]./) sub(/  +/, ": ", s)
            begin("item", s)
        }
        before = s
    }
    flush()
    return text
}

# The values of an enum from the rows of a list: "name = value", and what the other columns say.
function expand(list,    i, j, n, m, row, cell, title, says, names) {
    n = split(rows[list], row, "\n")
    m = split(columns, title, ", *")
    for (i = 1; i <= n; i++) {
        split(row[i], cell, ", *")
        says = ""
        for (j = valued ? 3 : 2; j <= m; j++)
            says = says (says == "" ? "" : ", ") (title[j] == "text" ? "" : title[j] " ") cell[j]
        gsub(/"/, "", says)
        print "    " cell[1] (valued ? " = " cell[2] : "") ", /**< " escape(says) " */"
    }
}

FNR == 1 { # the file's comment
    sub(/^\/\* /, "")
    print "/** @file " $1 "\n" escape($0) ".\n@verbatim"
    for (getline; $0 !~ /^ \*\//; getline) { sub(/^ \* ?/, ""); if (!/SPDX/) print }
    print "@endverbatim */"
    next
}
/^\/\* -+ [0-9]+ .* --- \*\/$/ {
    if (section != "") print "/** @} */"
    if (/Implementation ---/) { section = ""; exit }
    gsub(/^\/\* -+ | ---.*/, "")
    section = FILENAME
    sub(/.*\//, "", section)
    title = section " " $0
    section = section "_" $1
    sub(/\.h/, "", section)
    print "/** @defgroup " section " " title "\n@{ */"
    next
}
/^GMM_QUIET_/ { next }

# A comment on lines of its own.
/^ *\/\*/ {
    comment = $0
    match(comment, /^ */)
    base = RLENGTH + 3
    while (comment !~ /\*\//) { getline; comment = comment "\n" $0 }
    after = comment
    sub(/.*\*\//, "", after)
    sub(/ *\*\/[^\n]*$/, "", comment)
    sub(/^ *\/\*( ?-* )?/, "", comment)
    pending = doxygen(comment, base)
    fresh = 1
    if (after ~ /[^ ]/) print "/** " pending " */ " after
    next
}
/^[ \t]*$/ {
    if (pending != "" && section != "") print "/** @} */\n/** @addtogroup " section "\n" pending "@{ */"
    pending = last = ""
    print
    next
}
{
    if (pending != "") {
        print "/** " pending "*/"
        last = $0 ~ FUNCTION ? pending : ""
        if (/^#define .*_LIST\(X\)/) of_list = pending
        pending = ""
    } else if ($0 ~ FUNCTION && last != "" && !/\/\*/) print "/** " last "*/"
    else if (/^typedef enum/ && of_list != "") { print "/** " of_list "*/"; of_list = "" }
}
/^#define .*_LIST\(X\) \\$/ { # rows of an enum
    list = $2
    sub(/\(.*/, "", list)
    print
    for (getline; ; getline) {
        print
        row = $0
        if (sub(/^ *X\(/, "", row) && sub(/\) *\\?$/, "", row))
            rows[list] = rows[list] (rows[list] == "" ? "" : "\n") row
        if ($0 !~ /\\$/) break
    }
    next
}
/^#define GMM__X\(/ {
    columns = $0
    valued = /value/
    sub(/^#define GMM__X\(/, "", columns)
    sub(/\).*/, "", columns)
    next
}
/^#undef GMM__X/ { next }
/^ +GMM_[A-Z_]+_LIST\(GMM__X\)/ { list = $1; sub(/\(.*/, "", list); expand(list); next }
/^(GMM__HD|static inline).*\{$/ || (/\{$/ && header) { # a body, without its comments
    header = 0
    print
    for (getline; $0 !~ /^}/; getline) if (!/^#/) { gsub(/\/\*[^*]*\*\//, ""); gsub(/\/\*.*/, ""); print }
    print
    next
}
/^(GMM__HD|static inline)[^{;]*$/ { header = 1; print; next }
# A comment behind code.
/[^ ].*\/\*/ && !/^#(if|else|endif|include)/ && !/\\$/ {
    match($0, / *\/\*/)
    code = substr($0, 1, RSTART - 1)
    comment = substr($0, RSTART + RLENGTH)
    base = RSTART + RLENGTH
    while (comment !~ /\*\//) { getline; comment = comment " " strip($0) }
    after = comment
    sub(/.*\*\//, "", after)
    sub(/ *\*\/.*/, "", comment)
    if (after ~ /[^ ]/) print code after " /**<" escape(comment) " */"
    else if (code ~ /^ .*[a-z0-9\]], .*;$/ && code !~ /\(/) {
        # of several names: each gets the comment
        type = code
        match(type, /^ *(const )?(struct )?[A-Za-z0-9_]+ /)
        type = substr(type, RSTART, RLENGTH)
        sub(/;$/, "", code)
        n = split(substr(code, length(type) + 1), name, ", *")
        for (i = 1; i <= n; i++) print type name[i] "; /**<" escape(comment) " */"
    } else print code " /**<" escape(comment) " */"
    next
}
{ print }
END { if (section != "") print "/** @} */" }

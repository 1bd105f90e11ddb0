# Empties the bodies of a header's kernels, for units that need only the code around them, so that they compile fast.
/^GMM__(ROW_)?KERNEL/ { head = 1 }
body { if (/^}/) body = 0; else next }
{ print }
head && /[\\{]$/ { body = /\{$/; head = 0 } # kernels in macros stay

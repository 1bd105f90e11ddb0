# The kernels of a header with empty bodies: for units that need what stands around them, and soon.
/^GMM__KERNEL/ { head = 1 }
body { if (/^}/) body = 0; else next }
{ print }
head && /[\\{]$/ { body = /\{$/; head = 0 } # kernels in macros stay

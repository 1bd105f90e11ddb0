#!/bin/sh
# install.sh DESTDIR PREFIX: headers, gmm.pc and the CMake package below DESTDIR/PREFIX.
set -e
root=$1$2
mkdir -p "$root/include" "$root/lib/pkgconfig" "$root/lib/cmake/gmm"
cp gmm*.h gmm*.cuh "$root/include/"
cp examples/vendoring/gmm*.cmake "$root/lib/cmake/gmm/"
sed "s|@PREFIX@|$2|" examples/vendoring/gmm.pc.in > "$root/lib/pkgconfig/gmm.pc"

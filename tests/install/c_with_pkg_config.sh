#!/usr/bin/env bash
# A C program, compiled strictly as C by hand against the installed library.
#   c_with_pkg_config.sh LIBDIR CC SOURCE BINARY
set -euo pipefail
libdir=$1 cc=$2 source=$3 binary=$4
export PKG_CONFIG_PATH=$libdir/pkgconfig
read -ra cflags < <(pkg-config --cflags lla)
read -ra libs < <(pkg-config --libs lla)
"$cc" -std=c11 -pedantic -Wall -Wextra -Werror "${cflags[@]}" "$source" -o "$binary" "${libs[@]}" -lm -Wl,-rpath,"$libdir"
"$binary"

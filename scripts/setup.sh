#!/usr/bin/env bash
# Looks for what a build needs and is not a Rust package. What is missing is
# installed where apt-get can do it without a question; else this says what to
# install, and fails.
#
# Needed: Rust; a C++ compiler, for RocksDB; libclang with its headers, for
# bindgen, which makes the Rust declarations of RocksDB's functions.
set -euo pipefail
shopt -s nullglob

cd "$(dirname "$0")/.."

# --- Rust -------------------------------------------------------------------

wanted_rust=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)

# Whether version $1 is at least version $2.
at_least() {
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

check_rust() {
    if ! command -v cargo >/dev/null; then
        echo "setup: no cargo found: install Rust $wanted_rust or later, with rustup or from your distribution" >&2
        exit 1
    fi
    local found
    found=$(cargo --version | cut -d ' ' -f 2 | cut -d - -f 1)
    if ! at_least "$found" "$wanted_rust"; then
        echo "setup: cargo is version $found, and $wanted_rust or later is needed: run \`rustup update stable\`, or update your distribution's package" >&2
        exit 1
    fi
}

# --- what is not Rust -------------------------------------------------------

has_cxx() {
    local compiler
    for compiler in ${CXX:+"$CXX"} c++ g++ clang++; do
        if command -v "$compiler" >/dev/null; then
            return 0
        fi
    done
    return 1
}

# Folders in which the build looks for libclang.
libclang_folders() {
    if [ -n "${LIBCLANG_PATH:-}" ]; then
        # A folder, or the library itself. Nowhere else is looked then.
        if [ -d "$LIBCLANG_PATH" ]; then
            printf '%s\n' "$LIBCLANG_PATH"
        else
            dirname "$LIBCLANG_PATH"
        fi
        return
    fi
    local prefix
    if prefix=$("${LLVM_CONFIG_PATH:-llvm-config}" --prefix 2>/dev/null); then
        printf '%s\n' "$prefix/bin" "$prefix/lib" "$prefix/lib64"
    fi
    printf '%s\n' "${LD_LIBRARY_PATH:-}:${LIBRARY_PATH:-}" | tr ':' '\n'
    printf '%s\n' /usr/local/llvm*/lib* /usr/local/lib*/*/* /usr/local/lib*/* \
        /usr/local/lib* /usr/lib*/*/* /usr/lib*/* /usr/lib*
}

has_libclang() {
    local folder library
    while read -r folder; do
        if [ -z "$folder" ]; then
            continue
        fi
        for library in "$folder"/libclang{.so,.so.*,-[0-9]*.so,-[0-9]*.so.*}; do
            if [ -e "$library" ]; then
                return 0
            fi
        done
    done < <(libclang_folders)
    return 1
}

# libclang alone is not enough: it reads headers of its own (stddef.h and so on)
# that some distributions have in another package.
has_clang_headers() {
    # Whoever says where things are is believed.
    if [ -n "${LIBCLANG_PATH:-}${BINDGEN_EXTRA_CLANG_ARGS:-}" ]; then
        return 0
    fi
    local header
    for header in /usr/lib*/llvm*/lib*/clang/*/include/stddef.h \
        /usr/lib*/clang/*/include/stddef.h /usr/local/lib*/clang/*/include/stddef.h \
        "$("${LLVM_CONFIG_PATH:-llvm-config}" --prefix 2>/dev/null || true)"/lib*/clang/*/include/stddef.h; do
        return 0
    done
    return 1
}

# Sets `missing` to the Debian packages that bring what is not there.
look() {
    missing=()
    if ! has_cxx; then
        missing+=(g++)
    fi
    if ! has_libclang || ! has_clang_headers; then
        missing+=(libclang-dev)
    fi
}

# apt-get as root: directly, or by sudo if that asks for no password.
apt() {
    if [ "$(id -u)" -eq 0 ]; then
        DEBIAN_FRONTEND=noninteractive apt-get "$@"
    else
        sudo -n DEBIAN_FRONTEND=noninteractive apt-get "$@"
    fi
}

install_missing() {
    if ! command -v apt-get >/dev/null; then
        return 1
    fi
    if [ "$(id -u)" -ne 0 ] && ! sudo -n true 2>/dev/null; then
        return 1
    fi
    echo "setup: installing ${missing[*]}"
    apt update -qq </dev/null && apt install -y -qq --no-install-recommends "${missing[@]}" </dev/null
}

say_what_to_install() {
    cat >&2 <<END
setup: missing for the build: ${missing[*]} (these are Debian's names)

  Debian, Ubuntu   sudo apt-get install ${missing[*]}
  Fedora           sudo dnf install gcc-c++ clang-devel
  Arch             sudo pacman -S gcc clang
  elsewhere        a C++20 compiler, and libclang with its headers; if libclang
                   is in an unusual place, set LIBCLANG_PATH to its folder
END
}

check_rust
look
if [ ${#missing[@]} -gt 0 ]; then
    install_missing || true
    look
fi
if [ ${#missing[@]} -gt 0 ]; then
    say_what_to_install
    exit 1
fi
echo "setup: everything is there"

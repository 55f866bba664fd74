#!/usr/bin/env bash
# A software Vulkan (Mesa's lavapipe) that the WebGPU provider accepts, for Debian and Ubuntu machines without a GPU.
# Prints the exports that switch it on:
#
#     eval "$(bash scripts/software-vulkan.sh [DIR])"
#
# What goes wrong is said on standard error, and `false` is printed instead, so that the `eval` fails too.
#
# Installs nothing and replaces nothing. An installed Mesa is used where it is new enough (24); else a newer one is fetched
# from the mirror that apt is set up for and unpacked into DIR, by default
# ${XDG_CACHE_HOME:-~/.cache}/caracal/software-vulkan: on Debian 12, whose Mesa 22.3 is too old, from its backports.
set -euo pipefail

readonly minimum=24 package=mesa-vulkan-drivers
PATH=$PATH:/usr/sbin:/sbin # ldconfig, for users other than root
work=                      # a folder that goes at the end

finish() {
    if [ -n "$work" ]; then rm -rf "$work"; fi
    if [ "$1" -ne 0 ]; then echo false; fi
}
trap 'finish $?' EXIT

die() {
    printf 'software-vulkan: %s\n' "$*" >&2
    exit 1
}

# A command for the reader to paste, who may not be root.
run_this() { if [ "$(id -u)" -eq 0 ]; then echo "run: $*"; else echo "run: sudo $*"; fi; }

new_enough() { [ -n "$1" ] && dpkg --compare-versions "$1" ge "$minimum"; }

# The first description of lavapipe below a folder; nothing if there is none.
description_below() {
    if [ -d "$1" ]; then find "$1" -path '*/vulkan/icd.d/lvp_icd*.json' | sort | sed -n 1p; fi
}

# What a description says of its library: a path, or a name for the loader to look for.
named_in() { sed -nE 's/.*"library_path": *"([^"]+)".*/\1/p' "$1"; }

# The library that a description names; nothing if it is not there.
library_of() {
    local named
    named=$(named_in "$1")
    case $named in
        /*) if [ -f "$named" ]; then echo "$named"; fi ;;
        ?*) ldconfig -p | awk -v name="$named" '$1 == name { path = $NF } END { print path }' ;;
    esac
}

# Fails with what to install if the Vulkan loader or a library that Mesa needs is not there.
check_libraries() {
    local install missing
    install=$(run_this apt-get install -y libvulkan1 "$package")
    ldconfig -p | grep 'libvulkan\.so\.1 ' >/dev/null || die "libvulkan.so.1 is not installed; $install"
    missing=$(ldd "$1" | awk '/not found/ { print $1 }' | sort -u | paste -sd ' ')
    [ -z "$missing" ] || die "libraries that Mesa needs are not installed ($missing); $install"
}

print_exports() {
    local runtime=${XDG_RUNTIME_DIR:-}
    if [ -z "$runtime" ]; then
        runtime=$dir/run
        mkdir -p "$runtime"
        chmod 700 "$runtime"
    fi
    # VK_DRIVER_FILES is the newer name, and counts where both are set.
    printf 'export VK_ICD_FILENAMES=%q VK_DRIVER_FILES=%q\n' "$1" "$1"
    printf 'export ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1 XDG_RUNTIME_DIR=%q\n' "$runtime"
}

# apt-get with lists and caches of its own, so that it needs no rights and leaves the system's alone.
apt_get() {
    apt-get -qq -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o "APT::Sandbox::User=$(id -un)" \
        -o Acquire::Languages=none "$@" >&2
}

# Downloads Mesa's package into the current folder.
download() {
    local system mirror version sources=() keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    # shellcheck disable=SC1091
    system=$(. /etc/os-release && echo "${ID:-unknown} ${VERSION_CODENAME:-}")
    if [ "$system" = "debian bookworm" ]; then
        # shellcheck disable=SC2016 # apt's own variables
        mirror=$(apt-get indextargets --no-release-info --format '$(RELEASE) $(REPO_URI)' |
            awk '$1 == "bookworm" && !found { found = $2 } END { print found }')
        [ -n "$mirror" ] || die "apt has no source for bookworm; add one in /etc/apt/sources.list.d"
        [ -f "$keyring" ] || die "$keyring is missing; $(run_this apt-get install -y debian-archive-keyring)"
        echo "deb [signed-by=$keyring] $mirror bookworm-backports main" >"$work/sources.list"
        sources=(-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=-)
    fi
    apt_get "${sources[@]}" update || die "apt-get update failed, see above; can the mirror be reached from here?"
    apt_get "${sources[@]}" download "$package" || die "apt-get finds no $package for $system, see above"
    version=$(dpkg-deb --field "$package"_*.deb Version)
    new_enough "$version" ||
        die "the newest Mesa for $system is $version, and $minimum is needed; use a newer release, or a container of one"
}

main() {
    local description library tool json named
    if [ $# -gt 1 ] || [[ ${1:-} == -* ]]; then
        die "expected one folder at most, found: $*; usage: eval \"\$(bash scripts/software-vulkan.sh [DIR])\""
    fi
    for tool in apt-get dpkg-deb ldconfig; do
        command -v "$tool" >/dev/null ||
            die "$tool is not there: this script is for Debian and Ubuntu; elsewhere install the distribution's own" \
                "lavapipe and export VK_ICD_FILENAMES=(its lvp_icd…json) ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1"
    done
    dir=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/caracal/software-vulkan}
    mkdir -p "$dir" || die "$dir cannot be made; name another folder"
    dir=$(cd "$dir" && pwd)

    # What an earlier run unpacked, or what is installed.
    description=$(description_below "$dir/mesa")
    if [ -z "$description" ] && new_enough "$(dpkg-query -W -f '${Version}' "$package" 2>/dev/null || true)"; then
        description=$(description_below /usr/share)
    fi
    if [ -n "$description" ]; then
        library=$(library_of "$description")
        if [ -n "$library" ]; then
            check_libraries "$library"
            print_exports "$description"
            return
        fi
    fi

    work=$(mktemp -d "$dir/work.XXXXXX")
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/mesa"
    (cd "$work" && download)
    dpkg-deb --extract "$work/$package"_*.deb "$work/mesa"
    description=$(description_below "$work/mesa")
    library=$(find "$work/mesa" -name libvulkan_lvp.so | sort | sed -n 1p)
    if [ -z "$description" ] || [ -z "$library" ]; then die "the package $package has no lavapipe for $(uname -m)"; fi
    check_libraries "$library"
    # The description has to name the library where it will lie. Both are complete before they take their place.
    json=$(<"$description")
    named=$(named_in "$description")
    printf '%s\n' "${json/"\"$named\""/"\"$dir/mesa${library#"$work/mesa"}\""}" >"$description"
    rm -rf "$dir/mesa"
    mv "$work/mesa" "$dir/mesa"
    print_exports "$dir/mesa${description#"$work/mesa"}"
}

main "$@"

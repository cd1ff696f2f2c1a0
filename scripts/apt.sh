# To be sourced: installs packages by apt-get. The script that sources it has a function `skip`, which says why not and ends.

install_by_apt() { # install_by_apt WHO WHAT PACKAGE...: what they are called by, in its words
    local who=$1 what=$2 root=() log
    shift 2
    command -v apt-get >/dev/null || skip "there is no apt-get to install $what with"
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || skip "apt-get needs root"
        root=(sudo -n)
    fi
    echo "$who: installing $* with apt-get"
    log=$(mktemp)
    trap "rm -f '$log'" EXIT
    if ! { "${root[@]}" apt-get update &&
        "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@"; } >"$log" 2>&1; then
        tail -n 5 "$log" >&2
        skip "apt-get could not install $what (its last lines are above)"
    fi
}

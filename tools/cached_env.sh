# Sourced: a virtual environment in a cache folder outside the checkout, for a peer that tests run
# against and that can't live in .venv.
#
#   begin_env NAME FILE...  sets $env and $pip, under a lock; fails when all that the files say has
#                           been installed already
#   end_env                 notes that it is now

begin_env() {
    env="${XDG_CACHE_HOME:-$HOME/.cache}/mixed-samplers/$1"
    shift
    wanted="$(cat "$@" | sha256sum | cut -d' ' -f1)"
    mkdir -p "$(dirname "$env")"
    exec 9>"$env.lock"
    flock 9
    [ "$(cat "$env/.installed" 2>/dev/null)" != "$wanted" ] || return 1
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    pip=("$env/bin/python" -m pip install --quiet --quiet --disable-pip-version-check)
}

end_env() {
    echo "$wanted" >"$env/.installed"
}

#!/bin/sh
# Makes a virtual environment, and installs with apt what a bare Debian or Ubuntu does not have.
#
#   ./set_up.sh FOLDER demo|test|check
#
# The servers are installed but not used: demo and tests start private ones on free ports.
# RABBITDELAY_BROKER_URL and RABBITDELAY_REDIS_URL name servers that already run; what they stand
# for is then not installed.
set -eu

folder=$1
purpose=$2

find_python() {
    for name in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
}

# The packages that are missing, in the names of Debian and Ubuntu.
missing_packages() {
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    [ "$purpose" = check ] && return
    [ -n "${RABBITDELAY_REDIS_URL:-}" ] || command -v redis-server >/dev/null || echo redis-server
    # The tests also kill and suspend a broker, which has to be one of their own.
    if [ "$purpose" = test ] || [ -z "${RABBITDELAY_BROKER_URL:-}" ]; then
        [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || echo rabbitmq-server
    fi
    [ -n "${JAVA_HOME:-}" ] || command -v java >/dev/null || echo default-jre-headless
    # A client of check-in that has nothing to do with Python.
    [ "$purpose" != test ] || command -v amqp-publish >/dev/null || echo amqp-tools
    # The page that shows what waits is clicked through.
    if [ "$purpose" = test ]; then
        command -v chromium >/dev/null || command -v google-chrome >/dev/null || echo chromium
        command -v chromedriver >/dev/null || echo chromium-driver
    fi
    # Spark asks ps which processes are its own.
    command -v ps >/dev/null || echo procps
}

install_packages() {
    if ! command -v apt-get >/dev/null; then
        echo "This machine has no apt-get. Please install what these packages of Debian stand for," \
            "then run make again: $*" >&2
        exit 1
    fi
    as_root=
    if [ "$(id -u)" != 0 ]; then
        if ! command -v sudo >/dev/null; then
            echo "Neither root nor sudo. Please have an administrator install: $*" >&2
            exit 1
        fi
        as_root=sudo
    fi
    echo "Installing with apt-get: $*"
    $as_root apt-get update -qq
    $as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

tools=${XDG_CACHE_HOME:-$HOME/.cache}/celery_rabbitdelay

# Prometheus and promtool, unpacked and not installed: Debian's package would start a service.
unpack_prometheus() {
    if command -v promtool >/dev/null || [ -x "$tools/prometheus/usr/bin/promtool" ]; then
        return
    fi
    if ! command -v apt-get >/dev/null; then
        echo "This machine has no apt-get. Please install prometheus, then run make again." >&2
        exit 1
    fi
    echo "Unpacking prometheus into $tools/prometheus"
    download=$(mktemp -d)
    (cd "$download" && { apt-get download -qq prometheus || {
        as_root=
        [ "$(id -u)" = 0 ] || as_root=sudo
        $as_root apt-get update -qq && apt-get download -qq prometheus
    }; }) 2>/dev/null || {
        echo "Debian's package prometheus cannot be downloaded. Please install prometheus." >&2
        exit 1
    }
    mkdir -p "$tools/prometheus"
    dpkg-deb -x "$download"/prometheus_*.deb "$tools/prometheus"
    rm -r "$download"
}

python=$(find_python)
if [ -z "$python" ]; then
    echo "Python 3.11 or newer is needed, and was not found. Set PYTHON to name one." >&2
    exit 1
fi
packages=$(missing_packages)
if [ -n "$packages" ]; then
    # shellcheck disable=SC2086 - one word for each package
    install_packages $packages
fi

[ "$purpose" != test ] || unpack_prometheus

[ -x "$folder/bin/pip" ] || "$python" -m venv "$folder"
case $purpose in
    demo) wanted="-e . redis>=4.6 pyspark[sql]>=4.0 matplotlib>=3.8" ;;
    test) wanted="-e .[test]" ;;
    check) wanted="-e .[test,lint,types,docs] tox>=4.20" ;;
esac
echo "Installing into $folder: $wanted"
# shellcheck disable=SC2086 - one word for each requirement
"$folder/bin/pip" install --quiet --disable-pip-version-check $wanted
# Not into the environment: each start of celery there would import it, which takes a third of the time.
if [ "$purpose" = test ] && [ ! -d "$tools/flower" ]; then
    "$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps \
        --target "$tools/flower" "flower>=2.0,<3"
fi
# Only the script of axe-core in it is used; what the package needs beside that, a browser of its own, is not.
if [ "$purpose" = test ] && [ ! -d "$tools/axe" ]; then
    "$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps \
        --target "$tools/axe" "axe-playwright-python>=0.1.8,<0.2"
fi
touch "$folder/$purpose.done"

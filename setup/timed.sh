#!/usr/bin/env bash
# Runs a test binary so that it says how long each test took. RUSTC_BOOTSTRAP: libtest's option is nightly's, and a fresh
# machine has only stable. What makes its own trials, or comes from documentation, is run as it is.
case $1 in
*/deps/devices-* | */deps/memory-*) exec "$@" ;;
*/deps/*) RUSTC_BOOTSTRAP=1 exec "$@" -Z unstable-options --report-time ;;
*) exec "$@" ;;
esac

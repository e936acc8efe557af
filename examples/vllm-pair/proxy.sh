#!/bin/sh
# One address for both engines. PAIR is the folder with the sockets of the daemons; PORT, PREFILL_PORT
# and DECODE_PORT say where it and the engines serve; KVD is the command.
set -eu

pair=${PAIR:-/tmp/kvd-vllm-pair}
# Both engines share this machine: a decode engine that waits for a prompt would take a core from the
# one that computes it. With cores or GPUs of their own leave --in-turn out.
exec ${KVD:-kvd} proxy --in-turn --listen "127.0.0.1:${PORT:-8000}" \
    --prefill "http://127.0.0.1:${PREFILL_PORT:-8100},daemon=ipc://$pair/prefill/client.sock" \
    --decode "http://127.0.0.1:${DECODE_PORT:-8200},daemon=ipc://$pair/decode/client.sock"

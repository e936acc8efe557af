"""A whole engine of SGLang's on the CPU, a tiny Llama of random weights: ``... ROLE PORT MODEL``.

A line of JSON is a prompt: its tokens, and its room; the answer is what was generated. Kernels and
the packages that SGLang has for CPUs with AMX are stood in for (``absent``); attention is torch's.
"""

from __future__ import annotations

import json
import os
import sys


def say(**told):
    sys.__stdout__.write(f"{json.dumps(told)}\n")
    sys.__stdout__.flush()


def main():
    role, port, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    from sglang import Engine  # noqa: PLC0415 - its own processes import this module too

    engine = Engine(
        model_path=model,
        device="cpu",
        load_format="dummy",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        page_size=16,
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        max_total_tokens=2048,
        max_running_requests=4,
        mem_fraction_static=0.1,
        context_length=1024,
        chunked_prefill_size=64,
        random_seed=1,
        disaggregation_mode=role,
        disaggregation_transfer_backend="kvd",
        disaggregation_bootstrap_port=port,
        disaggregation_decode_retraction_backup="cpu_tensor",
        num_reserved_decode_tokens=16,
        log_level="warning",
    )
    say(ready=True)
    for line in sys.stdin:
        tokens, room = json.loads(line)
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
        try:
            answer = engine.generate(
                input_ids=tokens,
                sampling_params={"max_new_tokens": 8, "temperature": 0},
                **({} if role == "null" else where),
            )
        except ValueError as error:
            say(why=str(error))
        else:
            say(came=answer["output_ids"], finish=answer["meta_info"]["finish_reason"])
    os._exit(0)


if __name__ == "__main__":
    main()

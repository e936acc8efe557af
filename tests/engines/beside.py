"""Connectors that stand beside kvd's behind vLLM's ``MultiConnector``.

``BesideConnector`` hands over: it answers the keys that NIXL's does, and like that takes no other
one's word at the start. ``UnfilledConnector`` promises the KV of prompts, and cannot deliver it.
``NixlConnector`` is vLLM's own.
"""

from __future__ import annotations

import sys

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)


class OwnHandshake(KVConnectorHandshakeMetadata):
    pass


class OwnMetadata(KVConnectorMetadata):
    pass


class BesideConnector(KVConnectorBase_V1, SupportsHMA):
    def get_handshake_metadata(self):
        return OwnHandshake()

    def set_xfer_handshake_metadata(self, metadata):
        for told in metadata.values():
            if not isinstance(told, OwnHandshake):
                raise TypeError("BesideConnector expects OwnHandshake")

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return OwnMetadata()

    def request_finished_all_groups(self, request, block_ids):
        return False, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [1],
            "remote_engine_id": "x",
        }

    def request_finished(self, request, block_ids):
        return self.request_finished_all_groups(request, (block_ids,))

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass


class UnfilledMetadata(OwnMetadata):
    def __init__(self, blocks):
        self.blocks = blocks


class UnfilledConnector(BesideConnector):
    """Of prompts that begin with ``MARK`` it promises three blocks for the step that they are in.

    Nothing fills these; once that step is over it says so, and promises no more.
    """

    MARK, BLOCKS, TOKENS = 7, 3, 32

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.promised, self.asked, self.lost = set(), [], set()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        is_asked = request.prompt_token_ids[0] == self.MARK
        if num_computed_tokens or not is_asked or request.request_id in self.promised:
            return 0, False
        return self.BLOCKS * self.TOKENS, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self.promised.add(request.request_id)
            self.asked += blocks.get_block_ids()[0][: self.BLOCKS]

    def build_connector_meta(self, scheduler_output):
        asked, self.asked = self.asked, []
        return UnfilledMetadata(asked)

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def start_load_kv(self, forward_context, **kwargs):
        self.lost.update(self._get_connector_metadata().blocks)

    def get_block_ids_with_load_errors(self):
        lost, self.lost = self.lost, set()
        return lost


PAUSE_US = 1000
"""NIXL's progress thread looks without a pause: each engine would take a processor for that."""


def __getattr__(name):
    if name != "NixlConnector":
        raise AttributeError(name)
    import nixl._api  # noqa: PLC0415 - not everybody has it
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (  # noqa: PLC0415
        connector,
    )

    bindings = sys.modules[nixl._api.nixl_agent.__module__].nixlBind
    make = bindings.nixlAgent

    def calm(agent, config):
        config.pthrDelay = PAUSE_US
        return make(agent, config)

    if not hasattr(bindings, "made_calm"):
        bindings.nixlAgent, bindings.made_calm = calm, True
    return connector.NixlConnector

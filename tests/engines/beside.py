"""A connector that hands over, to stand beside kvd's behind vLLM's ``MultiConnector``.

It answers the keys that NIXL's does, and like that takes no other one's word at the start.
"""

from __future__ import annotations

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

"""A 2-D network as an encoder of volumes, for `octfm trust RUN --store prepared/ --external
docs/external_encoder.py:slices`.

The weights here are random, because none can be shipped: what it scores is what the architecture alone gives. For a
real comparison put your own folder into `from_pretrained` and repeat the resizing and normalisation that those weights
were trained with.
"""

import numpy as np


def slices():
    import torch
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    network = ViTModel(
        ViTConfig(hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768),
        add_pooling_layer=False,
    )
    # network = ViTModel.from_pretrained("folder/of/weights", local_files_only=True)
    network.eval()

    @torch.inference_mode()
    def embed(voxels: np.ndarray) -> np.ndarray:
        """Every fourth B-scan as a grey picture of 224 x 224; their mean is the volume's vector."""
        chosen = torch.from_numpy(np.ascontiguousarray(voxels[:, 2::4])).float() / 127.5 - 1
        pictures = torch.nn.functional.interpolate(chosen.flatten(0, 1)[:, None], (224, 224), mode="bilinear").expand(
            -1, 3, -1, -1
        )
        classes = torch.cat([network(part).last_hidden_state[:, 0] for part in pictures.split(32)])
        return classes.unflatten(0, chosen.shape[:2]).mean(1).numpy()

    return embed

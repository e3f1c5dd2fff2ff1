"""The oracle that tests of products in 8 bits share: every layer of a model against float64 on rounded copies."""

import torch


@torch.no_grad()
def worst_layer(small, plain, tokens, kind, fake_weight, fake_input):
    """Largest error of a layer of type `kind`, on the inputs that it met in `small`, over the layer's largest output.

    Layer by layer: a whole model would carry one tie that falls elsewhere through all later layers.
    """
    worst, handles, seen = 0.0, [], set()

    def see(name):
        def hook(module, args, output):
            nonlocal worst
            x = args[0].flatten(0, -2)
            right = fake_input(x).double() @ fake_weight(plain.get_submodule(name)).double().T
            off = (output.flatten(0, -2) - right).abs().max() / right.abs().max()
            worst = max(worst, off.item())
            seen.add(name)

        return hook

    for name, module in small.named_modules():
        if isinstance(module, kind):
            handles.append(module.register_forward_hook(see(name)))
    small(tokens)
    assert len(seen) == len(handles) > 0
    return worst

"""Sizes of a batch: global = volumes per device x ranks x accumulation passes."""

from octfm.errors import ConfigError


def accumulation(global_batch_size: int, per_device_batch_size: int, world: int) -> int:
    """Forward passes per optimizer step: global / (per device × world).

    Raises ConfigError, suggesting the nearest valid values, if it is not a whole number.
    """
    for name, value in (
        ("data.global_batch_size", global_batch_size),
        ("data.per_device_batch_size", per_device_batch_size),
        ("world", world),
    ):
        if value < 1:
            raise ConfigError(f"{name}: expected at least 1, got {value}")
    per_pass = per_device_batch_size * world
    passes, rest = divmod(global_batch_size, per_pass)
    if not rest:
        return passes
    choices = " or ".join(str(k * per_pass) for k in (passes, passes + 1) if k)
    remedy = f"data.global_batch_size={choices}"
    if global_batch_size % world == 0:
        share = global_batch_size // world
        divisors = [k for k in range(1, share + 1) if share % k == 0]
        below = [k for k in divisors if k < per_device_batch_size][-1:]
        above = [k for k in divisors if k > per_device_batch_size][:1]
        remedy += f", or data.per_device_batch_size={' or '.join(map(str, below + above))}"
    raise ConfigError(
        f"data.global_batch_size {global_batch_size} is not a multiple of per_device_batch_size "
        f"{per_device_batch_size} × {world} {'ranks' if world > 1 else 'rank'} = {per_pass}; "
        f"nearest that work: {remedy}"
    )

"""An engine's settings, dealt out over the cases of a test that compiles each of them. Not a test module."""


def kernel_of(knobs, launch=()):
    """The knobs of a setting that decide the compiled code: all but those named in `launch`, which only decide the launch."""
    return str([(name, value) for name, value in knobs.items_ if name not in launch])


def dealt(space, place, places, launch=()):
    """The first setting, and the settings of every `places`-th kernel, from number `place` on.

    Args:
        space: settings, in the engine's order.
        place: the case's number; numbers count round.
        places: cases that share the work: so many neighbouring numbers have all settings.
        launch: knobs that are not compiled in: settings that differ in them alone stay together.
    """
    kernels = sorted({kernel_of(knobs, launch) for knobs in space})
    own = set(kernels[place % places :: places])
    return [knobs for index, knobs in enumerate(space) if index == 0 or kernel_of(knobs, launch) in own]

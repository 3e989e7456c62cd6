"""Hypothesis strategies: layouts of all four kinds, delays that fit in them."""

from typing import get_args

from hypothesis import strategies as st

from celery_rabbitdelay.levels.layout import Layout, Zeros, binary, clock, custom, geometric

zeros = st.sampled_from(get_args(Zeros))


@st.composite
def custom_layouts(draw: st.DrawFn, max_levels: int = 5) -> Layout:
    """Levels of any base up to 12, each unit following from the one below."""
    bases = draw(st.lists(st.integers(2, 12), min_size=1, max_size=max_levels))
    unit_ms = draw(st.sampled_from([1, 10, 100, 250, 1000, 60_000]))
    levels = []
    for position, base in enumerate(reversed(bases)):
        levels.append((f"level-{position}", base, unit_ms / 1000))
        unit_ms *= base
    return custom(list(reversed(levels)), zeros=draw(zeros))


def small_layouts() -> st.SearchStrategy[Layout]:
    """Layouts that can express so few delays that a test can look at every one."""
    return custom_layouts(max_levels=3)


layouts = st.one_of(
    st.builds(clock, tick=st.sampled_from([1, 0.1, 0.01, 0.001]), zeros=zeros),
    st.builds(binary, tick=st.sampled_from([1, 0.5, 0.1]), levels=st.integers(1, 28), zeros=zeros),
    st.builds(
        geometric,
        tick=st.sampled_from([1, 0.1]),
        factor=st.integers(2, 12),
        levels=st.integers(1, 7),
        zeros=zeros,
    ),
    custom_layouts(),
)

destinations = st.text(min_size=1, max_size=80).filter(lambda name: len(name.encode()) <= 255)

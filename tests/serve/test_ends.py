"""After a hundred windows, a session still ends its turns where its system turn says."""

from __future__ import annotations

import pytest
from ends import POLICIES, shares
from toychat import train


@pytest.mark.slow
def test_after_a_hundred_windows_answers_end_where_the_system_turn_said():
    model = train()
    pinned = shares(model, POLICIES["pinned"], windows=(1, 100), sessions=2, turns=6, read=True)
    assert pinned[1].ended == pinned[100].ended == 12
    assert pinned[1].right >= 10
    assert pinned[100].right >= 10
    plain = shares(model, POLICIES["as it is"], windows=(1,), sessions=2, turns=6)
    assert plain[1].right <= 3  # without the system turn, the model does not know where to end

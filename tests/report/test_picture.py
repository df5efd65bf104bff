"""Pictures with what was looked at."""

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from regard.report.figures import picture_maps, save


def test_every_map_covers_the_picture_on_one_scale():
    light, heavy = torch.full((2, 3), 0.1), torch.full((2, 3), 0.8)
    figure = picture_maps(torch.rand(3, 8, 12), {"$a$": light, "b": heavy}, title="two maps")
    first, a, b = figure.axes[:3]
    assert len(first.images) == 1
    assert len(a.images) == len(b.images) == 2
    assert a.images[1].get_extent() == list(a.images[0].get_extent()) == [-0.5, 11.5, 7.5, -0.5]
    assert a.images[1].norm.vmax == b.images[1].norm.vmax == pytest.approx(0.8)
    assert a.get_title() == "$a$"


def test_other_pictures_stand_beside_it(tmp_path):
    figure = picture_maps(torch.zeros(1, 5, 5), {}, pictures={"restored": torch.ones(1, 5, 5)})
    assert [axes.get_title() for axes in figure.axes] == ["", "restored"]
    assert np.asarray(figure.axes[1].images[0].get_array()).min() == 1
    assert save(figure, tmp_path / "a.svg").read_bytes() == save(figure, tmp_path / "b.svg").read_bytes()


def test_what_is_no_picture_is_refused():
    with pytest.raises(ValueError, match=r"image: got shape \(4, 4\), expected \(C, H, W\)"):
        picture_maps(torch.rand(4, 4), {})
    with pytest.raises(ValueError, match="divide bytes by 255"):
        picture_maps(torch.full((1, 2, 2), 255.0), {})
    with pytest.raises(ValueError, match=r"maps\['a'\]: got shape \(4,\), expected rows and columns"):
        picture_maps(torch.rand(1, 4, 4), {"a": torch.rand(4)})
    with pytest.raises(ValueError, match="non-negative"):
        picture_maps(torch.rand(1, 4, 4), {"a": -torch.ones(2, 2)})

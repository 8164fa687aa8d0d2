"""Precisions: one grammar for all components, and one from dtypes; wrong ones are refused in one line."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory.errors import InvalidInput
from highwater.memory.options.precision import (
    FORM_OF,
    Precision,
    PrecisionItem,
    Precisions,
    parse_precision,
    precision_for,
)
from highwater.memory.options.profile import PROFILES, parse_profile
from highwater.memory.options.profile_arguments import build_profile
from highwater.memory.weights.known_forms import FORMS, numbers_of


def parse(text: str | None, *components: str) -> Any:
    return parse_precision(text, forms=FORMS, components=components)


def test_one_precision_for_all_or_one_for_each() -> None:
    assert parse(None) is None and parse("by profile") is None and parse("*=by profile") is None
    assert parse("fp8 scaled") == parse(" FP8  Scaled ") == Precision("fp8 scaled")
    several = parse("diffusion=fp8 scaled, te=bf16,text_encoder_2=by profile,*=as stored", "text_encoder_2")
    assert several == Precisions(
        (
            PrecisionItem(component="diffusion", precision=Precision("fp8 scaled")),
            PrecisionItem(component="text", precision=Precision("bf16")),
            PrecisionItem(component="text_encoder_2", precision=None),
            PrecisionItem(component="*", precision=Precision.AS_STORED),
        )
    )
    assert precision_for(several, "model", "diffusion") == Precision("fp8 scaled")
    assert precision_for(several, "clip", "text") == Precision("bf16")
    assert precision_for(several, "text_encoder_2", "text") is None
    assert precision_for(several, "ae", "vae") == Precision.AS_STORED
    assert precision_for(parse("text=fp8 plain"), "ae", "vae") is None, "what is not named is the profile's"
    assert parse(str(several), "text_encoder_2") == several


@pytest.mark.parametrize(
    ("text", "column", "why"),
    [
        ("", 1, "a precision is missing; allowed: as stored, fp8 scaled"),
        ("fp9", 1, "precision 'fp9' is unknown"),
        ("text=fp9", 6, "precision 'fp9' is unknown"),
        ("text=", 6, "a precision is missing"),
        ("txt=bf16", 1, "component 'txt' is unknown; did you mean 'text'"),
        ("text=bf16,te=fp16", 11, "'text' has two precisions"),
        ("bf16,fp16", 6, r"'\*' has two precisions"),
        ("fp8 scaled=1", 11, "'=' is unexpected; allowed: ',' or the end"),
        ("text=bf16,", 11, "a precision is missing"),
    ],
)
def test_an_error_names_the_column_and_what_is_allowed(text: str, column: int, why: str) -> None:
    with pytest.raises(InvalidInput, match=f"column {column}: {why}"):
        parse(text)


@pytest.mark.parametrize(("stored", "scale"), FORM_OF)
def test_every_storage_dtype_and_scale_has_its_form(stored: str, scale: str) -> None:
    for given in (stored, getattr(torch, stored, stored), f"torch.{stored}"):
        precision = Precision.of(given, "float32", scale=scale)
        assert precision.name == FORM_OF[stored, scale] and precision.compute == "F32"
        assert FORMS[precision.name][0].name == precision.name
    usual = next(own for form, own in FORM_OF if form == stored)
    assert Precision.of(stored).name == FORM_OF[stored, usual]
    if (stored, "row") not in FORM_OF:
        with pytest.raises(InvalidInput, match=f"scale 'row' of {stored}; .*allowed: {usual}"):
            Precision.of(stored, scale="row")


@pytest.mark.parametrize("form", ["int8", "qint8", "qint4", "qfloat8", "fp8 per row"])
def test_a_profile_says_to_which_form_it_quantizes(form: str) -> None:
    profile = parse_profile(f"4,form= {form.upper() if False else form} ,prefetch=2", devices=["cpu"])
    assert profile.form == form and profile.quantize == PROFILES["4"].quantize
    assert parse_profile(str(profile), devices=["cpu"]) == profile and f"form={form}" in str(profile)
    assert profile.to_json()["form"] == form and PROFILES["4"].form == "fp8 scaled"
    assert build_profile(4, devices=["cpu"], form=form) == replace(PROFILES["4"], form=form)
    with pytest.raises(InvalidInput, match="form 8; allowed: the name of a storage form, such as 'int8'"):
        build_profile(4, devices=["cpu"], form=8)


def test_two_bits_are_refused_with_the_reason() -> None:
    with pytest.raises(InvalidInput, match=r"column 6: precision 'qint2' is not offered: two bits lose 0\.6 of each"):
        parse("text=qint2")
    with pytest.raises(InvalidInput, match=r"precision 'qint2' is not offered"):
        numbers_of(Precision("qint2"))


def test_what_is_kept_is_named_by_patterns_and_classes() -> None:
    precision = Precision.of("fp8", exclude=["attn", r"\.norm$"], exclude_classes=[nn.Conv2d, "Embedding"])
    assert precision.exclude == ("attn", r"\.norm$") and precision.exclude_classes == ("Conv2d", "Embedding")


@pytest.mark.parametrize(
    ("arguments", "options", "why"),
    [
        (["int4"], {}, "storage_dtype 'int4'; .*allowed: float8_e4m3fn, float8_e5m2, bfloat16, float16, int8"),
        ([torch.float32], {}, "storage_dtype .torch.float32.; .*allowed"),
        (["fp8", "fp8"], {}, "storage_dtype and compute_dtype are both float8_e4m3fn: nothing would be cast"),
        ([torch.bfloat16, torch.bfloat16], {}, "storage_dtype and compute_dtype are both bfloat16"),
        (["fp8", "e5m2"], {}, "compute_dtype e5m2: no layer computes in it"),
        (["fp8", "int8"], {}, "compute_dtype 'int8'; allowed: float32, bfloat16, float16"),
        (["fp8"], {"scale": "column"}, "scale 'column' of float8_e4m3fn; allowed: tensor, row, none"),
        (["fp8"], {"exclude": "norm"}, r"exclude 'norm'; allowed: a list of them, such as \['norm'\]"),
        (["fp8"], {"exclude_classes": "Linear"}, "exclude_classes 'Linear'; allowed: a list"),
        (["fp8"], {"exclude_classes": nn.Linear}, "exclude_classes .*Linear.*; allowed: a list"),
        (["fp8"], {"exclude": [3]}, "exclude .*3.*; allowed: a list of texts"),
        (["fp8"], {"exclude": ["("]}, r"exclude '\(' is no regular expression"),
        (["fp8"], {"granularity": "leaf"}, "granularity 'leaf' is unknown; allowed: layer, block, component"),
        (["fp8"], {"honours_declared": "no"}, "honours_declared 'no'; allowed: True or False"),
        (["fp8"], {"error_limit": 0}, "error_limit 0; allowed: a number above 0"),
        (["fp8"], {"error_limit": math.nan}, "error_limit nan; allowed: a number above 0"),
        (["fp8"], {"error_limit": "0.1"}, "error_limit '0.1'; allowed: a number above 0"),
    ],
)
def test_a_wrong_field_is_refused_in_one_line(arguments: list[Any], options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        Precision.of(*arguments, **options)

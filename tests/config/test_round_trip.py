"""Every configuration survives TOML, YAML and JSON; the schema accepts what is written."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from isoform.config import ModelConfig, dumps, parse, presets, read, schema, write
from isoform.config.files import _loads
from isoform.errors import ConfigError
from strategies import model_configs

SUFFIXES = (".toml", ".yaml", ".json")
PRESETS = {name: function(vocab_size=8000) for name, function in presets.PRESETS.items()}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", PRESETS)
def test_preset_survives_a_file(name, suffix, tmp_path):
    path = tmp_path / f"config{suffix}"
    write(PRESETS[name], path)
    assert read(ModelConfig, path) == PRESETS[name]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=model_configs())
def test_any_configuration_survives_every_syntax(config):
    for suffix in SUFFIXES:
        again = parse(ModelConfig, _loads(dumps(config, suffix), suffix))
        assert again == config
        assert hash(again) == hash(config)
    assert parse(ModelConfig, config.model_dump()) == config


def test_schema_is_valid_and_agrees_with_the_classes():
    rules = schema(ModelConfig)
    jsonschema.Draft202012Validator.check_schema(rules)
    accepts = jsonschema.Draft202012Validator(rules).is_valid
    for name in ("original", "albert", "gemma2", "mixtral", "t5"):
        assert accepts(json.loads(dumps(PRESETS[name], ".json"))), name
    data = json.loads(dumps(PRESETS["bert"], ".json"))
    data["encoder"]["layer"]["placment"] = "post"
    assert not accepts(data)
    meanings = rules["$defs"]["Layer"]["properties"]
    assert all(field.get("description") for field in meanings.values())


def test_absent_parts_are_left_out_unless_they_must_be_written():
    data = yaml.safe_load(dumps(PRESETS["gpt2"], ".yaml"))
    assert "source" not in data
    assert "qk_norm" not in data["decoder"]["layer"]["attention"]
    assert yaml.safe_load(dumps(PRESETS["original"], ".yaml"))["decoder"]["final_norm"] == "none"


def test_unknown_syntax_is_refused():
    with pytest.raises(ConfigError, match=r"cannot write '\.ini'; expected one of \.toml"):
        dumps(PRESETS["gpt2"], ".ini")

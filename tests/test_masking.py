"""Secrets are masked by the names of settings, in addresses and in words; everything else stays as
it is.
"""

from __future__ import annotations

import pytest

from flatout import masking
from flatout.errors import UserError
from flatout.masking import is_masked, mask, mask_addresses, mask_settings, mask_words


@pytest.mark.parametrize(
    "address",
    [
        "s3://{}@bucket/rows.csv",
        "s3://KEY:{}@bucket/rows.csv?region=eu",
        "s3://KEY:a/{}@bucket/rows.csv",
        "s3://KEY:a@{}@bucket/rows.csv",
        "https://user:{}@server/rows?page=2",
        "mysql://root:{}@server:3306/table",
        "https://server/rows?token={}",
        "https://server/rows?page=2&access_key={}&x=1",
        "s3://bucket/rows?secret_key={}",
        "https://server/rows?X-Amz-Signature={}&sig={}",
        "https://server/rows#access_token={}",
        "https://server/rows?pass={}&jwt={}",
        "https://server/login?next=https://other/x?token={}",
        "https://server/a?x=1?sig={}",
        "https://user:pa://{}@server",
        "see https://user:{}@server, and s3://K:{}@bucket",
    ],
)
def test_secrets_of_an_address_are_masked_in_texts_settings_and_words(address):
    given = address.replace("{}", "sw0rdfish")
    for masked in (
        mask_addresses(given),
        mask_settings({"data": {"source": [given]}})["data"]["source"][0],
        mask_words([f"data.source='{given}'"])[0],
        str(UserError("data.source", f"{given} cannot be read")),
    ):
        assert "sw0rdfish" not in masked
        assert is_masked(masked)
    assert mask_addresses(mask_addresses(given)) == mask_addresses(given)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a@b.csv",
        "http://server:5000/a@b",
        "https://server/rows?page=2",
        "s3://${oc.env:KEY}:${oc.env:SECRET}@bucket/rows.csv",
        "data.encoding.secret=${oc.env:FLATOUT_SECRET}",
        "model.hidden=8",
        "data.tokens_per_batch=4096",
        "+tokenizer.pad_token=[PAD]",
        "data.encoding={secret: ${oc.env:FLATOUT_SECRET}, size: 64}",
        "someone@example.org",
    ],
)
def test_what_is_no_secret_stays(text):
    assert mask_words([text]) == [text]
    assert mask_addresses(text) == text


@pytest.mark.parametrize(
    "word",
    [
        "data.encoding.secret=sw0rdfish",
        "++data.encoding.secret='sw0rdfish, and more'",
        "data.encoding={size: 64, secret: sw0rdfish}",
        "+callbacks.x.api_key=sw0rdfish",
        "+callbacks.x.password=sw0rdfish",
        "+callbacks.x.auth_token=sw0rdfish",
        "data.encoding.secret=a,sw0rdfish",
        "data.encoding={secret: 'it\\'s sw0rdfish', size: 64}",
        "data.encoding={secret: a b sw0rdfish , size: 64}",
        "+callbacks.x.hf_token=sw0rdfish",
        "+callbacks.x.api_token=sw0rdfish",
        "+callbacks.x.credentials.user=sw0rdfish",
        "+callbacks.x.secret[0]=sw0rdfish",
        "+callbacks.x={y: 1, db_passphrase: sw0rdfish}",
    ],
)
def test_a_word_that_sets_a_secret_is_masked(word):
    (masked,) = mask_words([word])
    assert "sw0rdfish" not in masked
    assert is_masked(masked)
    assert masked.partition("=")[0] == word.partition("=")[0]
    assert mask_words([masked]) == [masked]


@pytest.mark.parametrize(
    "text",
    [
        "x=" + "://a:b" * 200_000,
        "data.source=x://?" + "token" * 200_000,
        "x={secret:" + " " * 200_000,
        "x={" + "a_" * 200_000,
        "x={secret: '" + "\\'" * 200_000,
        "x=a://" + "?#;&" * 200_000,
        "x=@" + "://a:b" * 200_000,
        "x=" + "://a:1/" * 200_000 + "@",
    ],
    ids=["addresses", "tokens", "blanks", "names", "quotes", "signs", "users", "ports"],
)
def test_a_long_text_of_others_is_read_about_once(text):
    # an expression that begins anew at each place would take hours here
    assert len(mask_words([text])[0]) <= len(text)


def test_a_text_of_thousands_of_secrets_is_masked_as_well():
    # a digest of each would take minutes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking, "_MOST_SECRETS", 3)
        patch.setattr(masking, "_masks", {})
        first = mask("the first")
        texts = (f"s3://k:sw0rdfish{number}@b" for number in range(20_000))
        masked = mask_addresses(" ".join(texts))
        assert mask("the first") == first != "***-0000"
    assert "sw0rdfish" not in masked
    assert masked.count("s3://***-0000@b") == 20_000 - 2


def test_a_mask_tells_two_secrets_apart_and_is_the_same_for_the_same_secret():
    assert mask("one") == mask("one") != mask("two")
    assert mask_settings({"secret": "one", "size": 64}) == {"secret": mask("one"), "size": 64}
    assert mask_settings({"data.encoding.secret": "one"}) == {"data.encoding.secret": mask("one")}
    assert len(mask("one")) == len("***-9f3c")  # 16 bits: too few to find a secret by


def test_a_password_of_digits_and_all_that_a_secret_mapping_holds_are_masked():
    masked = mask_settings({"password": 12345678, "secret": {"a": ["sw0rdfish"]}, "seed": 12345678})
    assert is_masked(masked["password"])
    assert is_masked(masked["secret"]["a"][0])
    assert masked["seed"] == 12345678

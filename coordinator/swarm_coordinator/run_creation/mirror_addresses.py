"""The web address of a mirror that is a folder of a bucket or of a hub's data set.

Public buckets and data sets answer https with Range requests, so a volunteer needs neither a client
of each service nor its credentials (docs/decisions, numbers 0032 and 0038). The forms are those of
the services' own tools; where they are served:

- Amazon S3: https://docs.aws.amazon.com/AmazonS3/latest/userguide/VirtualHosting.html
- Google Cloud Storage: https://cloud.google.com/storage/docs/request-endpoints
- Hugging Face Hub: https://huggingface.co/docs/huggingface_hub/guides/hf_file_system
"""

from __future__ import annotations

import re

from swarm_shared.base.errors import ConfigurationError

_HUB = re.compile(
    r"(?P<repository>datasets/[^/@]+/[^/@]+)(?:@(?P<revision>[^/@]+))?(?:/(?P<path>.+))?"
)


def web_address(address: str) -> str:
    """Return the https address of `s3://…`, `gs://…` or `hf://datasets/…`, and any other address
    as it is, all without a slash at the end. ConfigurationError for a form that is none of these.
    """
    scheme, _, rest = address.partition("://")
    rest = rest.rstrip("/")
    bucket, _, key = rest.partition("/")
    match scheme:
        case "s3" if "." in bucket:
            # The certificate of the service covers names without dots only.
            return _joined("https://s3.amazonaws.com", bucket, key)
        case "s3":
            return _joined(f"https://{bucket}.s3.amazonaws.com", key)
        case "gs":
            return _joined("https://storage.googleapis.com", bucket, key)
        case "hf":
            return _hub_address(address, rest)
        case _:
            return address.rstrip("/")


def _hub_address(address: str, rest: str) -> str:
    found = _HUB.fullmatch(rest)
    if found is None:
        raise ConfigurationError(
            f"{address!r} names no data set; write hf://datasets/OWNER/NAME/FOLDER, with "
            "@REVISION after NAME for another one than main"
        )
    return _joined(
        "https://huggingface.co", found["repository"], "resolve", found["revision"] or "main",
        found["path"] or "",
    )  # fmt: skip


def _joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)

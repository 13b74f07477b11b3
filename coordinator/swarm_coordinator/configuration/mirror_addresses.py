"""The forms of a mirror's address: a web folder, a folder of a bucket, or of a hub's data set.

Public buckets and data sets answer https with Range requests, so a volunteer needs neither a client
of each service nor its credentials (docs/decisions, numbers 0032 and 0038). The forms are those of
the services' own tools; where they are served:

- Amazon S3: https://docs.aws.amazon.com/AmazonS3/latest/userguide/VirtualHosting.html
- Google Cloud Storage: https://cloud.google.com/storage/docs/request-endpoints
- Hugging Face Hub: https://huggingface.co/docs/huggingface_hub/guides/hf_file_system
"""

from __future__ import annotations

import re

_HUB = r"hf://(datasets/[^/@\s]+/[^/@\s]+)(?:@([^/@\s]+))?(?:/(\S*))?"
ADDRESS_PATTERN = rf"(?:https?://\S+|(?:s3|gs)://[^/\s]\S*|{_HUB})"
"""Of one address."""


def web_address(address: str) -> str:
    """Return the web address of a mirror, without a slash at the end, from one that matches
    ADDRESS_PATTERN."""
    scheme, _, rest = address.partition("://")
    bucket, _, key = rest.strip("/").partition("/")
    match scheme:
        case "s3" if "." in bucket:
            # The certificate of the service covers names without dots only.
            return _joined("https://s3.amazonaws.com", bucket, key)
        case "s3":
            return _joined(f"https://{bucket}.s3.amazonaws.com", key)
        case "gs":
            return _joined("https://storage.googleapis.com", bucket, key)
    if hub := re.fullmatch(_HUB, address.rstrip("/")):
        repository, revision, path = hub.groups(default="")
        return _joined("https://huggingface.co", repository, "resolve", revision or "main", path)
    return address.rstrip("/")


def _joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)

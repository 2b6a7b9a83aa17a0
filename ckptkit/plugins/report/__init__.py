"""Draw the shard maps of `inspect`, and write the page of `report`: tested in Chromium; no conversion needs them."""

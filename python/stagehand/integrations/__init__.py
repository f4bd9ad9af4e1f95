"""Whole programs of other libraries under stagehand: `integrations.diffusers`, `integrations.transformers`,
`integrations.lightning`."""

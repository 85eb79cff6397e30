//! What only a wire can do: be cut, lead nowhere, or end at something that is no store.

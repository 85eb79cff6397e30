//! The hook tools.

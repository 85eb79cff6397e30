//! Idempotency keys: an operator's command writes its key into the objects that it creates, so that
//! after a lost answer its own work is recognised, also by another process that repeats the
//! command.

use super::cas_retry::CasRetry;
use super::credentials::random_hex;
use super::environment::Environment;
use super::error::Error;
use super::paths::NodePath;

/// Random bytes in a key.
const KEY_BYTES: usize = 16;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyKey {
    text: String,
    /// The command ran before, with an unknown result.
    repeated: bool,
}

impl IdempotencyKey {
    /// # Errors
    /// If the system has no randomness.
    pub fn new() -> Result<Self, Error> {
        Ok(Self { text: random_hex(KEY_BYTES)?, repeated: false })
    }

    /// The key of a command that is repeated. `None` if the text is no key.
    pub fn again(text: &str) -> Option<Self> {
        let is_key = text.len() == 2 * KEY_BYTES && text.bytes().all(|b| b.is_ascii_hexdigit());
        is_key.then(|| Self { text: text.to_owned(), repeated: true })
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    pub(super) fn retry_at(&self, path: NodePath) -> CasRetry {
        let mut retry = CasRetry::at(path);
        retry.unsure = self.repeated;
        retry
    }
}

impl<T> Environment<T> {
    /// The same environment, for one command.
    #[must_use]
    pub fn with_key(self, key: IdempotencyKey) -> Self {
        Self { key: Some(key), ..self }
    }

    /// Whether the command is a repeated one.
    pub fn is_repeated(&self) -> bool {
        self.key.as_ref().is_some_and(|key| key.repeated)
    }

    /// The key of the command that this environment was opened for, or a new one.
    pub(super) fn key(&self) -> Result<IdempotencyKey, Error> {
        self.key.clone().map_or_else(IdempotencyKey::new, Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_key_that_was_generated_is_accepted_again() {
        let first = IdempotencyKey::new().unwrap();
        let again = IdempotencyKey::again(first.as_str()).unwrap();
        assert_eq!((again.as_str(), again.repeated, first.repeated), (first.as_str(), true, false));
        for nonsense in ["", "abc", &"g".repeat(32), &"a".repeat(31), &"a".repeat(33)] {
            assert_eq!(IdempotencyKey::again(nonsense), None, "{nonsense}");
        }
    }
}

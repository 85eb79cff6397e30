//! Confirmation by a second read. A read that would remove much at once may be wrong, so the
//! removal waits until a second read asks for it, too. Each part compares its own reads. Pure.

use std::time::Duration;

/// How long after the first read the second one may begin. Two reads at nearly the same time may
/// both show the same error.
pub const CONFIRM_AFTER: Duration = Duration::from_secs(2);

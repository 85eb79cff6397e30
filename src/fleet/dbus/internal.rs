//! The interfaces of the connection between a manager and an agent, as zbus proxies: the manager
//! calls [`AgentProxy`], the agent calls [`ManagerProxy`]. Both are peers without a bus; the
//! destination of a message is ignored.
//!
//! # Contract
//!
//! - An agent calls `Register` first. Until the reply, neither side sends anything else. If the
//!   manager replies with an error, it closes the connection.
//! - Job ids belong to one connection. When the connection ends, the manager ends its jobs, and the
//!   agent forgets their ids; an agent never sends `JobDone` with the id of an earlier connection.
//! - `StartUnit`, `StopUnit`, `ReloadUnit`, `RestartUnit` and `StartTransientUnit` return when
//!   systemd has queued the job, or with systemd's error; after an error there is no `JobDone`.
//!   Each accepted job ends with one `JobDone`, which may be sent before the reply.
//! - `JobCancel` of an unknown id does nothing: the job has just ended.
//! - `Subscribe` adds a systemd unit, or a glob, to a set. It is idempotent, and sends
//!   `UnitPropertiesChanged` for every loaded unit that matches, also if it was in the set before.
//!   While systemd is not reachable, the signals wait until it is.
//!   `Unsubscribe` removes it from the set.
//! - `UnitPropertiesChanged` contains all of `OBSERVED_PROPERTIES`, and is sent once for each
//!   change of a matching unit, also if several members of the set match.
//! - `UnitNew` precedes the first `UnitPropertiesChanged` of a unit that systemd has loaded while
//!   subscribed. `UnitRemoved` follows the last.
//! - After `Register` the agent announces its proxies with `ProxyNew`, after `ProxyDependents`, or
//!   with `ProxyEstablished`; then it sends `ProxiesAnnounced`, and later changes as they happen.
//!   The object of a proxy has the escaped name of its systemd unit. The manager calls `Ready` on
//!   it with the target's instance of systemd and no text, or with the reason of a failure, and
//!   `TargetStopped` when the proxy has ended.
//! - Both sides send `Heartbeat` every two seconds. Any message proves that the peer is alive.

mod agent;
mod manager;
mod proxy;

pub use agent::AgentProxy;
pub use manager::ManagerProxy;
pub use proxy::ProxyProxy;

//! The EC2 driver: one security group for each machine, in which our rules carry our mark. Start
//! with [`Access::find`].
//!
//! Decisions are in files without I/O: `naming` (ownership), `permission` (rules and EC2's
//! permissions), `error_codes` (the meaning of errors), `rate_limit/token_buckets` (request rates),
//! `read_your_writes` (stale reads). `api` makes the calls and `rate_limit` delays and counts them;
//! `groups`, `rules` and `machines` combine them. Only this module may use the SDK.
//!
//! No call goes to STS or IAM. Credentials come from the SDK's own chain: environment, profile,
//! role.

mod api;
mod error_codes;
mod groups;
mod machines;
mod naming;
mod permission;
mod rate_limit;
mod read_your_writes;
mod rules;

use crate::error::{Error, Subject};
use crate::provider::{GroupId, MachineNumber};
use api::Api;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_sdk_ec2::config::retry::RetryConfig;
use aws_sdk_ec2::config::timeout::TimeoutConfig;
pub use naming::{Environment, InvalidEnvironment};
use rate_limit::RateLimiter;
use read_your_writes::RecentWrites;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// EC2's default limit of rules for a group and address family.
pub const RULES_PER_FAMILY: usize = 60;

/// Time limit for finding the region, which may query the instance metadata service.
const START_MAX: Duration = Duration::from_secs(15);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ec2Settings {
    pub environment: Environment,
    /// Overrides the region of the environment, the profile or the instance.
    pub region: Option<String>,
    /// Overrides EC2's own endpoint for the region.
    pub endpoint_url: Option<String>,
    /// Settings of new instances; without them none can be launched.
    pub launch: Option<LaunchSettings>,
    pub rules_per_family: usize,
    pub timeouts: Timeouts,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchSettings {
    pub image: String,
    pub instance_type: String,
    /// Without it, EC2 chooses a subnet of the default VPC.
    pub subnet: Option<String>,
    pub key: Option<String>,
}

/// Time limits of requests, and retries of reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    pub connect: Duration,
    /// Time limit of a change, including waiting before it. A change that hangs delays its pass and
    /// the closes after it.
    pub request: Duration,
    /// Time limit of a read. Under load EC2 may take half a minute to describe groups, and ports
    /// must still be closed.
    pub read: Duration,
    /// Attempts of a read. Changes are sent once: the SDK's retries are disabled, because they
    /// would bypass the rate limiter.
    pub reads: u32,
    /// Pause before the first retry; doubles with each one.
    pub first_pause: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(3),
            request: Duration::from_secs(10),
            read: Duration::from_secs(40),
            reads: 3,
            first_pause: Duration::from_millis(500),
        }
    }
}

impl Ec2Settings {
    pub fn new(environment: Environment) -> Self {
        Self {
            environment,
            region: None,
            endpoint_url: None,
            launch: None,
            rules_per_family: RULES_PER_FAMILY,
            timeouts: Timeouts::default(),
        }
    }
}

/// Region and credentials, from the usual AWS sources.
#[derive(Debug, Clone)]
pub struct Access(SdkConfig);

impl Access {
    /// Finds the region. Credentials are loaded when they are needed, because those of a role may
    /// become available shortly after the instance starts. Makes no call to EC2.
    ///
    /// # Errors
    /// [`Error::Unusable`] if there is no region, or an invalid one.
    pub async fn find() -> Result<Self, Error> {
        let slow = |_| unusable("finding out the region took too long");
        let loading = aws_config::defaults(BehaviorVersion::latest()).load();
        let config = tokio::time::timeout(START_MAX, loading).await.map_err(slow)?;
        region_of(None, &config)?;
        Ok(Self(config))
    }
}

/// The driver of one environment in one region of EC2. All its calls share a rate limiter.
pub struct Ec2 {
    settings: Ec2Settings,
    api: Api,
    memory: Mutex<Memory>,
}

/// Caches, which can be lost at any time.
#[derive(Debug, Default)]
struct Memory {
    recent_writes: RecentWrites,
    /// The last known group of each machine, which saves a read before every change.
    groups: BTreeMap<MachineNumber, GroupId>,
    /// Whether a VPC has IPv6, and the time of that read.
    ipv6: BTreeMap<String, (bool, Instant)>,
    /// The VPC of new instances.
    home: Option<String>,
}

impl fmt::Debug for Ec2 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ec2").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Ec2 {
    /// # Errors
    /// As for [`Ec2::with_config`].
    pub fn connect(settings: Ec2Settings, access: &Access) -> Result<Self, Error> {
        Self::with_config(settings, &access.0)
    }

    /// Creates a driver; values that are not in `settings` come from `config`.
    ///
    /// # Errors
    /// [`Error::Unusable`] if neither names a valid region.
    pub fn with_config(settings: Ec2Settings, config: &SdkConfig) -> Result<Self, Error> {
        let region = region_of(settings.region.as_deref(), config)?;
        let endpoint = settings.endpoint_url.clone().or_else(|| config.endpoint_url().map(str::to_owned));
        let timeouts = settings.timeouts;
        let timeout_config = |operation| {
            TimeoutConfig::builder().connect_timeout(timeouts.connect).operation_timeout(operation).build()
        };
        let rate_limiter = RateLimiter::new();
        let mut client = aws_sdk_ec2::config::Builder::from(config)
            .region(Region::new(region.clone()))
            .retry_config(RetryConfig::disabled())
            .timeout_config(timeout_config(timeouts.request))
            .interceptor(rate_limiter.clone());
        client.set_endpoint_url(endpoint.clone());
        let place = endpoint.map_or_else(
            || format!("EC2 in region '{region}' (is that the right one?)"),
            |endpoint| format!("EC2 at {endpoint}"),
        );
        let reader = client.clone().timeout_config(timeout_config(timeouts.read));
        let [client, reader] = [client, reader].map(|config| aws_sdk_ec2::Client::from_conf(config.build()));
        Ok(Self {
            settings,
            api: Api::new(client, reader, rate_limiter, timeouts, place),
            memory: Mutex::default(),
        })
    }

    /// Returns the number of requests by action.
    pub fn requests(&self) -> BTreeMap<String, u64> {
        self.api.rate_limiter.requests()
    }

    /// Returns the fraction of EC2's published request rate that is used: less than 1 after
    /// throttling.
    pub fn pace(&self) -> f64 {
        self.api.rate_limiter.pace()
    }

    fn environment(&self) -> &Environment {
        &self.settings.environment
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn region_of(chosen: Option<&str>, config: &SdkConfig) -> Result<String, Error> {
    let region = chosen.or_else(|| config.region().map(AsRef::as_ref));
    let region =
        region.ok_or_else(|| unusable("no region for EC2: set AWS_REGION, or one in the profile"))?;
    check_region(region)?;
    Ok(region.to_owned())
}

/// Checks the region, which becomes part of a host name.
fn check_region(region: &str) -> Result<(), Error> {
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    if region.is_empty() || region.len() > 63 || !region.bytes().all(allowed) {
        let shown: String = region.chars().take(63).collect();
        return Err(unusable(&format!("no region of EC2 is called {shown:?}")));
    }
    Ok(())
}

fn unusable(reason: &str) -> Error {
    Error::Unusable { what: Subject::Provider, reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_regions_are_refused() {
        for good in ["us-east-1", "eu-central-2", "cn-north-1"] {
            assert_eq!(check_region(good), Ok(()));
        }
        for bad in ["", "us east", "US-EAST-1", "evil.example.com/", &"x".repeat(64)] {
            assert_eq!(check_region(bad).unwrap_err().kind(), "unusable", "{bad}");
        }
    }

    #[test]
    fn missing_region_is_reported() {
        let settings = Ec2Settings::new(Environment::new("prod", "6f1c").unwrap());
        let error = Ec2::with_config(settings, &SdkConfig::builder().build()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the provider cannot be used: no region for EC2: set AWS_REGION, or one in the profile"
        );
    }
}

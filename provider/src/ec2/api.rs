//! The calls to EC2, one function each: filtered, paged, rate-limited, and with classified errors.
//! Decisions belong in `groups`, `rules` and `machines`; the meaning of errors belongs in
//! `error_codes`.

use super::Timeouts;
use super::error_codes::{CallError, Effect, Failure, classify};
use super::rate_limit::RateLimiter;
use crate::error::{Error, Subject};
use crate::provider::{GroupId, InstanceId};
use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_ec2::Client;
use aws_sdk_ec2::config::interceptors::BeforeTransmitInterceptorContextMut;
use aws_sdk_ec2::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_ec2::error::{BoxError, DisplayErrorContext, ProvideErrorMetadata, SdkError};
use aws_sdk_ec2::operation::run_instances::builders::RunInstancesFluentBuilder;
use aws_sdk_ec2::types::{
    Filter, Instance, IpPermission, ResourceType, SecurityGroup, Subnet, Tag, TagSpecification, Vpc,
};
use std::error::Error as StdError;
use std::future::Future;
use tokio::time::Instant;

/// EC2's largest page.
const PAGE: i32 = 1000;
/// Limit of pages, far above the groups or instances of any account.
const PAGES_MAX: usize = 200;

#[derive(Debug)]
pub(super) struct Api {
    client: Client,
    /// A client with longer timeouts, for reads.
    reader: Client,
    pub(super) rate_limiter: RateLimiter,
    timeouts: Timeouts,
    /// The endpoint, for error messages.
    pub(super) place: String,
}

type Called<T> = Result<T, CallError>;

impl Api {
    pub(super) fn new(
        client: Client,
        reader: Client,
        rate_limiter: RateLimiter,
        timeouts: Timeouts,
        place: String,
    ) -> Self {
        Self { client, reader, rate_limiter, timeouts, place }
    }

    /// Reads with retries, so that one refused page does not fail a read of many pages. Changes are
    /// not retried here; the caller decides that.
    async fn read<T, E, S>(
        &self,
        action: &'static str,
        what: &Subject,
        send: impl Fn() -> S + Send,
    ) -> Called<T>
    where
        E: ProvideErrorMetadata + StdError + Send + Sync + 'static,
        S: Future<Output = Result<T, SdkError<E>>> + Send,
    {
        let mut pause = self.timeouts.first_pause;
        // A refused read is retried; a read that hung has used up its time.
        let patient_until = Instant::now() + self.timeouts.request / 2;
        for _ in 1..self.timeouts.reads {
            self.rate_limiter.admit(action, what, None).await.map_err(CallError::Error)?;
            match self.answer(action, Effect::Reads, what, send()).await {
                Err(CallError::Error(Error::Throttled { .. } | Error::Unavailable { .. }))
                    if Instant::now() < patient_until => {}
                answer => return answer,
            }
            tokio::time::sleep(self.rate_limiter.spread(pause)).await;
            pause *= 2;
        }
        self.rate_limiter.admit(action, what, None).await.map_err(CallError::Error)?;
        self.answer(action, Effect::Reads, what, send()).await
    }

    /// Sends one request, unless `until` has passed.
    async fn change<T, E>(
        &self,
        action: &'static str,
        what: &Subject,
        until: Option<Instant>,
        sent: impl Future<Output = Result<T, SdkError<E>>> + Send,
    ) -> Called<T>
    where
        E: ProvideErrorMetadata + StdError + Send + Sync + 'static,
    {
        self.rate_limiter.admit(action, what, until).await.map_err(CallError::Error)?;
        self.answer(action, Effect::Writes, what, sent).await
    }

    async fn answer<T, E>(
        &self,
        action: &'static str,
        effect: Effect,
        what: &Subject,
        sent: impl Future<Output = Result<T, SdkError<E>>> + Send,
    ) -> Called<T>
    where
        E: ProvideErrorMetadata + StdError + Send + Sync + 'static,
    {
        let error = match sent.await {
            Ok(answer) => {
                self.rate_limiter.succeeded(action);
                return Ok(answer);
            }
            Err(error) => error,
        };
        let failure = self.failure(&error);
        let busy = matches!(failure, Failure::Answer { status: 429 | 503, .. });
        let error = classify(failure, effect, what.clone());
        if busy || matches!(error, CallError::Error(Error::Throttled { .. })) {
            self.rate_limiter.throttled(action);
        }
        tracing::debug!(action, ?error, "EC2 refused");
        Err(error)
    }

    fn failure<E>(&self, error: &SdkError<E>) -> Failure
    where
        E: ProvideErrorMetadata + StdError + Send + Sync + 'static,
    {
        if find::<TooLate>(error).is_some() {
            return Failure::TooLate;
        }
        let reason = || DisplayErrorContext(error).to_string();
        let not_reached =
            || Failure::NotReached { reason: format!("cannot reach {}: {}", self.place, root(error)) };
        if let Some(cause) = find::<CredentialsError>(error) {
            return Failure::NoCredentials { reason: root(cause).to_string() };
        }
        match error {
            SdkError::ServiceError(service) => Failure::Answer {
                status: service.raw().status().as_u16(),
                code: service.err().code().map(str::to_owned),
                message: service.err().message().unwrap_or_default().to_owned(),
            },
            SdkError::ResponseError(response) if response.raw().status().as_u16() >= 400 => {
                let status = response.raw().status().as_u16();
                Failure::Answer { status, code: None, message: String::new() }
            }
            SdkError::TimeoutError(_) => Failure::TimedOut,
            SdkError::DispatchFailure(_) if never_connected(error) => not_reached(),
            SdkError::DispatchFailure(failure) if failure.is_timeout() => Failure::TimedOut,
            SdkError::DispatchFailure(_) => Failure::Broken { reason: root(error).to_string() },
            SdkError::ConstructionFailure(_) => Failure::NotSent { reason: reason() },
            _ => Failure::Garbled { reason: reason() },
        }
    }

    pub(super) async fn groups(&self, what: &Subject, filters: Vec<Filter>) -> Called<Vec<SecurityGroup>> {
        let mut found = Vec::new();
        let mut pages = Pages::new(what);
        while let Some(token) = pages.next()? {
            let request = self.reader.describe_security_groups().max_results(PAGE);
            let request = request.set_filters(Some(filters.clone())).set_next_token(token);
            let page = self.read("DescribeSecurityGroups", what, || request.clone().send()).await?;
            pages.seen(page.next_token);
            found.extend(page.security_groups.unwrap_or_default());
        }
        Ok(found)
    }

    pub(super) async fn instances(&self, what: &Subject, filters: Vec<Filter>) -> Called<Vec<Instance>> {
        let mut found = Vec::new();
        let mut pages = Pages::new(what);
        while let Some(token) = pages.next()? {
            let request = self.reader.describe_instances().max_results(PAGE);
            let request = request.set_filters(Some(filters.clone())).set_next_token(token);
            let page = self.read("DescribeInstances", what, || request.clone().send()).await?;
            pages.seen(page.next_token);
            let reservations = page.reservations.unwrap_or_default();
            found.extend(reservations.into_iter().flat_map(|one| one.instances.unwrap_or_default()));
        }
        Ok(found)
    }

    pub(super) async fn vpcs(&self, filters: Vec<Filter>) -> Called<Vec<Vpc>> {
        let mut found = Vec::new();
        let mut pages = Pages::new(&Subject::Provider);
        while let Some(token) = pages.next()? {
            let request = self.reader.describe_vpcs().max_results(PAGE);
            let request = request.set_filters(Some(filters.clone())).set_next_token(token);
            let page = self.read("DescribeVpcs", &Subject::Provider, || request.clone().send()).await?;
            pages.seen(page.next_token);
            found.extend(page.vpcs.unwrap_or_default());
        }
        Ok(found)
    }

    pub(super) async fn subnets(&self, filters: Vec<Filter>) -> Called<Vec<Subnet>> {
        let request = self.reader.describe_subnets().set_filters(Some(filters));
        let page = self.read("DescribeSubnets", &Subject::Provider, || request.clone().send()).await?;
        Ok(page.subnets.unwrap_or_default())
    }

    pub(super) async fn create_group(
        &self,
        what: &Subject,
        name: String,
        description: String,
        vpc: &str,
        tags: Vec<Tag>,
    ) -> Called<GroupId> {
        let request = self.client.create_security_group().group_name(name).description(description);
        let request = request.vpc_id(vpc).tag_specifications(tagged(ResourceType::SecurityGroup, tags));
        let made = self.change("CreateSecurityGroup", what, None, request.send()).await?;
        made.group_id.map(GroupId::new).ok_or_else(|| incomplete(what, "a new group without an id"))
    }

    pub(super) async fn authorize(
        &self,
        group: &GroupId,
        permissions: Vec<IpPermission>,
        until: Option<Instant>,
    ) -> Called<()> {
        let request = self.client.authorize_security_group_ingress();
        let request = request.group_id(group.as_str()).set_ip_permissions(Some(permissions));
        let sent = request.customize().interceptor(NotAfter(until)).send();
        self.change("AuthorizeSecurityGroupIngress", &group.into(), until, sent).await.map(drop)
    }

    pub(super) async fn revoke(
        &self,
        group: &GroupId,
        permissions: Vec<IpPermission>,
        until: Option<Instant>,
    ) -> Called<()> {
        let request = self.client.revoke_security_group_ingress();
        let request = request.group_id(group.as_str()).set_ip_permissions(Some(permissions));
        let sent = request.customize().interceptor(NotAfter(until)).send();
        self.change("RevokeSecurityGroupIngress", &group.into(), until, sent).await.map(drop)
    }

    pub(super) async fn delete_group(&self, group: &GroupId) -> Called<()> {
        let request = self.client.delete_security_group().group_id(group.as_str());
        self.change("DeleteSecurityGroup", &group.into(), None, request.send()).await.map(drop)
    }

    /// Launches an instance. `fill` completes the request, which has too many fields for arguments.
    pub(super) async fn run(
        &self,
        what: &Subject,
        tags: Vec<Tag>,
        fill: impl FnOnce(RunInstancesFluentBuilder) -> RunInstancesFluentBuilder,
    ) -> Called<Instance> {
        let request = self.client.run_instances().min_count(1).max_count(1);
        let request = request.tag_specifications(tagged(ResourceType::Instance, tags));
        let run = self.change("RunInstances", what, None, fill(request).send()).await?;
        let mut instances = run.instances.unwrap_or_default().into_iter();
        instances.next().ok_or_else(|| incomplete(what, "a launch without an instance"))
    }

    pub(super) async fn terminate(&self, instance: &InstanceId) -> Called<()> {
        let request = self.client.terminate_instances().instance_ids(instance.as_str());
        self.change("TerminateInstances", &instance.into(), None, request.send()).await.map(drop)
    }

    pub(super) async fn create_tags(&self, instance: &InstanceId, tags: Vec<Tag>) -> Called<()> {
        let request = self.client.create_tags().resources(instance.as_str()).set_tags(Some(tags));
        self.change("CreateTags", &instance.into(), None, request.send()).await.map(drop)
    }

    pub(super) async fn tag_group(&self, group: &GroupId, tag: Tag) -> Called<()> {
        let request = self.client.create_tags().resources(group.as_str()).tags(tag);
        self.change("CreateTags", &group.into(), None, request.send()).await.map(drop)
    }

    pub(super) async fn delete_tags(&self, instance: &InstanceId, tags: Vec<Tag>) -> Called<()> {
        let request = self.client.delete_tags().resources(instance.as_str()).set_tags(Some(tags));
        self.change("DeleteTags", &instance.into(), None, request.send()).await.map(drop)
    }

    /// Replaces all groups of a network interface.
    pub(super) async fn set_groups(
        &self,
        instance: &InstanceId,
        interface: &str,
        groups: Vec<String>,
    ) -> Called<()> {
        let request = self.client.modify_network_interface_attribute();
        let request = request.network_interface_id(interface).set_groups(Some(groups));
        self.change("ModifyNetworkInterfaceAttribute", &instance.into(), None, request.send()).await.map(drop)
    }
}

/// Refuses to transmit after the deadline, however long loading credentials and signing took.
#[derive(Debug)]
struct NotAfter(Option<Instant>);

#[derive(Debug, thiserror::Error)]
#[error("too late to be sent")]
struct TooLate;

impl Intercept for NotAfter {
    fn name(&self) -> &'static str {
        "NotAfter"
    }

    fn modify_before_transmit(
        &self,
        _context: &mut BeforeTransmitInterceptorContextMut<'_>,
        _components: &RuntimeComponents,
        _config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let late = self.0.is_some_and(|until| Instant::now() >= until);
        if late { Err(TooLate.into()) } else { Ok(()) }
    }
}

/// Iterates over pages, with a limit.
struct Pages<'a> {
    what: &'a Subject,
    next: Option<Option<String>>,
    read: usize,
}

impl<'a> Pages<'a> {
    fn new(what: &'a Subject) -> Self {
        Self { what, next: Some(None), read: 0 }
    }

    /// Returns the token of the next page; `None` after the last one.
    fn next(&mut self) -> Called<Option<Option<String>>> {
        self.read += 1;
        if self.read > PAGES_MAX && self.next.is_some() {
            return Err(incomplete(self.what, "an answer of too many pages"));
        }
        Ok(self.next.take())
    }

    fn seen(&mut self, token: Option<String>) {
        self.next = token.filter(|token| !token.is_empty()).map(Some);
    }
}

pub(super) fn filter(name: impl Into<String>, values: impl IntoIterator<Item = String>) -> Filter {
    Filter::builder().name(name).set_values(Some(values.into_iter().collect())).build()
}

fn tagged(resource: ResourceType, tags: Vec<Tag>) -> TagSpecification {
    TagSpecification::builder().resource_type(resource).set_tags(Some(tags)).build()
}

fn incomplete(what: &Subject, reason: &str) -> CallError {
    CallError::Error(Error::Ambiguous { what: what.clone(), reason: format!("EC2 answered with {reason}") })
}

fn chain<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

fn find<'a, E: StdError + 'static>(error: &'a (dyn StdError + 'static)) -> Option<&'a E> {
    chain(error).find_map(|error| error.downcast_ref())
}

/// Returns the root cause.
fn root<'a>(error: &'a (dyn StdError + 'static)) -> &'a (dyn StdError + 'static) {
    chain(error).last().unwrap_or(error)
}

/// Returns whether no connection was made, so that the call had no effect.
fn never_connected(error: &(dyn StdError + 'static)) -> bool {
    find::<hyper_util::client::legacy::Error>(error)
        .is_some_and(hyper_util::client::legacy::Error::is_connect)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_end_at_an_empty_token_or_at_the_limit() {
        let mut pages = Pages::new(&Subject::Provider);
        assert_eq!(pages.next(), Ok(Some(None)));
        pages.seen(Some("a".to_owned()));
        assert_eq!(pages.next(), Ok(Some(Some("a".to_owned()))));
        pages.seen(Some(String::new()));
        assert_eq!(pages.next(), Ok(None));
        let mut endless = Pages::new(&Subject::Provider);
        for _ in 0..PAGES_MAX {
            assert!(matches!(endless.next(), Ok(Some(_))));
            endless.seen(Some("same".to_owned()));
        }
        assert!(endless.next().is_err());
    }
}

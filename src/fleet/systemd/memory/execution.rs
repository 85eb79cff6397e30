//! The execution of jobs by a systemd in memory.

use tokio::sync::oneshot;

use super::{Behaviour, Job, MASKED, MODES, State, UNIT_EXISTS, Unit};
use crate::fleet::dbus::errors::{CallError, INVALID_ARGS, JOB_QUEUED, NO_SUCH_UNIT};
use crate::fleet::dbus::values::{JobResult, JobType, UnitFileChange};
use crate::fleet::name::check_systemd_unit;
use crate::fleet::systemd::{Event, JobRequest, QueuedJob, UnitState};

impl State {
    /// Returns a unit. An instance of a template is created when it is first used.
    pub(super) fn unit(&mut self, name: &str) -> Result<&mut Unit, CallError> {
        check_systemd_unit(name)
            .map_err(|_| CallError::new(INVALID_ARGS, "the name of the unit is invalid"))?;
        if !self.units.contains_key(name) {
            let template = name.split_once('@').map(|(prefix, _)| format!("{prefix}@.service"));
            let behaviour =
                template.and_then(|template| self.units.get(&template)).map(|unit| unit.behaviour);
            let behaviour =
                behaviour.ok_or_else(|| CallError::new(NO_SUCH_UNIT, format!("Unit {name} not found.")))?;
            self.units.insert(name.to_owned(), Unit::new(behaviour));
        }
        self.units.get_mut(name).ok_or_else(|| CallError::new(NO_SUCH_UNIT, "no such unit"))
    }

    pub(super) fn emit(&self, event: Event) {
        // A receiver that is full or gone loses events; tests read all of them.
        let _ = self.events.try_send(event);
    }

    /// Sets the state of a unit and reports the change.
    pub(super) fn set(&mut self, name: &str, (active, sub): (&str, &str), result: &str) {
        let Some(unit) = self.units.get_mut(name) else { return };
        let next = UnitState {
            active: active.to_owned(),
            sub: sub.to_owned(),
            result: Some(result.to_owned()),
            ..unit.state.clone()
        };
        if next != unit.state {
            unit.state = next.clone();
            if self.watched.matches(name) {
                self.emit(Event::Unit(name.to_owned(), next));
            }
        }
    }

    pub(super) fn queue(&mut self, request: JobRequest) -> Result<QueuedJob, CallError> {
        let JobRequest { kind, unit, mode, transient } = request;
        if !MODES.contains(&mode.as_str()) {
            return Err(CallError::new(INVALID_ARGS, format!("Job mode {mode} invalid")));
        }
        if transient.is_some() {
            if self.units.contains_key(&unit) {
                return Err(CallError::new(UNIT_EXISTS, format!("Unit {unit} already exists.")));
            }
            self.units.insert(unit.clone(), Unit::new(Behaviour::Quick));
        }
        if self.unit(&unit)?.behaviour == Behaviour::Masked && kind != JobType::Stop {
            return Err(CallError::new(MASKED, format!("Unit {unit} is masked.")));
        }
        let (done, receiver) = oneshot::channel();
        let present = self.jobs.iter().find(|(_, job)| job.unit == unit).map(|(id, job)| (*id, job.kind));
        if let Some((id, present)) = present {
            if present == kind {
                self.jobs.entry(id).and_modify(|job| job.done.push(done));
                return Ok(QueuedJob { id, done: receiver });
            }
            if mode == "fail" {
                return Err(CallError::new(JOB_QUEUED, format!("Transaction for {unit} is destructive.")));
            }
            self.end(id, JobResult::Cancelled);
        }
        self.last_job += 1;
        let id = self.last_job;
        self.jobs.insert(id, Job { unit, kind, done: vec![done] });
        self.execute(id);
        Ok(QueuedJob { id, done: receiver })
    }

    /// Executes a job, with the result that the behaviour of its unit determines.
    pub(super) fn execute(&mut self, id: u32) {
        let Some((unit, kind)) = self.jobs.get(&id).map(|job| (job.unit.clone(), job.kind)) else { return };
        let Some(behaviour) = self.units.get(&unit).map(|unit| unit.behaviour) else { return };
        let active = self.units.get(&unit).is_some_and(|unit| unit.state.active == "active");
        match kind {
            JobType::Reload => {
                self.end(id, if active { JobResult::Done } else { JobResult::Skipped });
            }
            JobType::Stop if active && behaviour == Behaviour::Stubborn => {
                self.set(&unit, ("deactivating", "stop-sigterm"), "success");
            }
            JobType::Stop => {
                self.set(&unit, ("inactive", "dead"), "success");
                self.end(id, JobResult::Done);
            }
            JobType::Start if active => self.end(id, JobResult::Done),
            JobType::Start | JobType::Restart => self.start(id, &unit, behaviour),
        }
    }

    pub(super) fn start(&mut self, id: u32, unit: &str, behaviour: Behaviour) {
        let result = match behaviour {
            Behaviour::Slow if !self.slow_may_start => {
                self.set(unit, ("activating", "start"), "success");
                return;
            }
            Behaviour::Slow => {
                self.set(unit, ("active", "exited"), "success");
                JobResult::Done
            }
            Behaviour::Failing => {
                self.set(unit, ("failed", "failed"), "exit-code");
                JobResult::Failed
            }
            Behaviour::Dependent => JobResult::Dependency,
            Behaviour::TooSlow => {
                self.set(unit, ("inactive", "dead"), "success");
                JobResult::Timeout
            }
            Behaviour::Quick | Behaviour::Stubborn | Behaviour::Masked => {
                self.set(unit, ("active", "running"), "success");
                JobResult::Done
            }
        };
        self.end(id, result);
    }

    pub(super) fn end(&mut self, id: u32, result: JobResult) {
        let Some(job) = self.jobs.remove(&id) else { return };
        if result == JobResult::Cancelled && job.kind == JobType::Start {
            self.set(&job.unit, ("inactive", "dead"), "success");
        }
        for done in job.done {
            // The receiver may have been dropped.
            let _ = done.send(result);
        }
    }
}

impl State {
    /// Changes the state of unit files. All of them must exist.
    pub(super) fn set_files(
        &mut self,
        files: &[String],
        (from, to): (&str, &str),
        change: &str,
    ) -> Result<Vec<UnitFileChange>, CallError> {
        for file in files {
            self.unit(file)?;
        }
        let mut changes = Vec::new();
        for file in files {
            let unit = self.unit(file)?;
            if unit.state.file == from {
                to.clone_into(&mut unit.state.file);
                changes.push((change.to_owned(), format!("/wants/{file}"), format!("/units/{file}")));
            }
        }
        Ok(changes)
    }
}

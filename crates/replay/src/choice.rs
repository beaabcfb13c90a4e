//! [`ReplayedImplementations`]: the implementations that a replay runs, of either kind of problem.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use assay_core::implementation::Implementation;
use assay_core::problem::HeadProblem;
use assay_registry::{find, head_registry, registry};

use crate::ReplayError;

/// The implementations that a replay runs.
#[derive(Clone, Default)]
pub struct ReplayedImplementations {
    /// The implementations of the loss on logits.
    pub on_logits: Vec<Arc<dyn Implementation>>,
    /// The implementations of the loss with an LM head.
    pub heads: Vec<Arc<dyn Implementation<HeadProblem>>>,
    /// The ids that were asked for; empty if all implementations run. An implementation that was asked for has a line in the
    /// summary even if it compared nothing.
    pub ids: Vec<String>,
}

impl ReplayedImplementations {
    /// Returns all implementations there are. Those that need a PJRT plugin use `plugin`, as [`registry`] does.
    ///
    /// ```
    /// use assay_replay::ReplayedImplementations;
    ///
    /// let all = ReplayedImplementations::all(None);
    /// assert!(all.on_logits.iter().any(|implementation| implementation.id() == "native"));
    /// ```
    pub fn all(plugin: Option<&Path>) -> Self {
        Self { on_logits: registry(plugin), heads: head_registry(plugin), ids: Vec::new() }
    }

    /// Returns the implementations called `ids`, or all if there are no ids.
    ///
    /// ```
    /// use assay_replay::{ReplayError, ReplayedImplementations};
    ///
    /// let chosen = ReplayedImplementations::with_ids(&["native-lm-head".to_string()], None).unwrap();
    /// assert_eq!((chosen.on_logits.len(), chosen.heads.len()), (0, 1));
    /// let unknown = ReplayedImplementations::with_ids(&["nobody".to_string()], None);
    /// assert!(matches!(unknown, Err(ReplayError::Unknown(_))));
    /// ```
    ///
    /// # Errors
    /// [`ReplayError::Unknown`] and [`ReplayError::Unavailable`], which name the id.
    pub fn with_ids(ids: &[String], plugin: Option<&Path>) -> Result<Self, ReplayError> {
        if ids.is_empty() {
            return Ok(Self::all(plugin));
        }
        let heads = head_registry(plugin);
        let mut chosen = Self { ids: ids.to_vec(), ..Self::default() };
        for id in ids {
            let unavailable = |why| ReplayError::Unavailable { id: id.clone(), why };
            if let Some(head) = heads.iter().find(|head| head.id() == id) {
                head.available().map_err(unavailable)?;
                chosen.heads.push(Arc::clone(head));
                continue;
            }
            let implementation = find(id, plugin).map_err(ReplayError::Unknown)?;
            implementation.available().map_err(unavailable)?;
            chosen.on_logits.push(implementation);
        }
        Ok(chosen)
    }

    /// Refuses a device count that none of the implementations can be run on here.
    pub(crate) fn expect_devices(&self, devices: &[usize]) -> Result<(), ReplayError> {
        let each = self.each();
        let Some(&given) = devices.iter().find(|given| !each.iter().any(|one| one.takes(**given))) else {
            return Ok(());
        };
        let counts: BTreeSet<usize> = each.iter().flat_map(ReplayedImplementation::device_counts).collect();
        let counts: Vec<String> = counts.iter().map(usize::to_string).collect();
        let whose = if self.ids.is_empty() { "some implementation".into() } else { self.ids.join(" or ") };
        Err(ReplayError::Devices { given, whose, counts: counts.join(", ") })
    }

    /// Returns the implementations on logits, then those with an LM head.
    pub(crate) fn each(&self) -> Vec<ReplayedImplementation<'_>> {
        let on_logits = self.on_logits.iter().map(|one| ReplayedImplementation::OnLogits(&**one));
        on_logits.chain(self.heads.iter().map(|head| ReplayedImplementation::Head(&**head))).collect()
    }
}

/// One implementation to run, of either kind.
pub(crate) enum ReplayedImplementation<'s> {
    OnLogits(&'s dyn Implementation),
    Head(&'s dyn Implementation<HeadProblem>),
}

impl ReplayedImplementation<'_> {
    pub(crate) fn id(&self) -> &str {
        match self {
            Self::OnLogits(implementation) => implementation.id(),
            Self::Head(head) => head.id(),
        }
    }

    pub(crate) fn device_counts(&self) -> Vec<usize> {
        match self {
            Self::OnLogits(implementation) => implementation.device_counts(),
            Self::Head(head) => head.device_counts(),
        }
    }

    fn takes(&self, devices: usize) -> bool {
        match self {
            Self::OnLogits(implementation) => implementation.takes(devices),
            Self::Head(head) => head.takes(devices),
        }
    }
}

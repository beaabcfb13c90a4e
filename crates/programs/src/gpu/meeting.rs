//! Ways in which the CTAs of a cluster meet.

/// The environment variable that chooses how the CTAs of `gpu-one-pass` meet: `barrier`, the default, or `stores`.
pub const MEETING_VARIABLE: &str = "ASSAY_GPU_MEETING";

/// A way in which each CTA of a cluster learns what the others have found. Both give the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MeetingMethod {
    /// Plain stores, then the barrier of the cluster: its release is a fence of the whole GPU.
    #[default]
    Barrier,
    /// Asynchronous stores whose bytes each CTA counts on a barrier of its own: no fence, and a text of PTX 8.1, CUDA 12.1 or newer.
    Stores,
}

impl MeetingMethod {
    /// Returns the way that [`MEETING_VARIABLE`] chooses.
    ///
    /// # Errors
    /// Returns the variable's value where it names no way.
    pub fn chosen() -> Result<Self, String> {
        match std::env::var_os(MEETING_VARIABLE) {
            None => Ok(Self::default()),
            Some(name) if name == "barrier" || name.is_empty() => Ok(Self::Barrier),
            Some(name) if name == "stores" => Ok(Self::Stores),
            Some(name) => Err(name.to_string_lossy().into_owned()),
        }
    }
}

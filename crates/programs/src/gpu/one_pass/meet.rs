//! Meetings of a cluster's CTAs: each is told what the others have found, and folds it.

use super::super::folds::over_lanes;
use super::super::row::RowCut;
use super::{BARRIER, ClusterMeeting, ClusterWriter, MEETINGS, ThreadIndex, softmaxes};
use assay_ptx::{Arrival, PtxAddress, PtxBuilder, PtxValue};

impl ClusterWriter {
    /// Returns the barrier of a meeting in this CTA, where CTAs meet by stores.
    pub(super) fn barrier_of(&self, met: ClusterMeeting) -> Option<PtxAddress> {
        self.shared.meetings.map(|all| PtxAddress::Shared(all, BARRIER * met as u32))
    }

    /// Makes this CTA's barriers, where CTAs meet by stores, before it says that it is there: peers may then store.
    pub(super) fn make_barriers(&self, on: &mut PtxBuilder, thread: PtxValue<u32>) {
        let barriers = MEETINGS.map(|met| self.barrier_of(met).map(|barrier| (barrier, self.bytes_of(met))));
        let [Some(maxima), Some(sums)] = barriers else { return };
        let is_first = on.less(thread, 1);
        on.when(is_first, |on| {
            for (barrier, _) in [maxima, sums] {
                on.init_barrier(barrier);
            }
            on.fence_barriers();
            // The only arrival of each phase: what remains is the bytes, of which none can come before this.
            for (barrier, bytes) in [maxima, sums] {
                on.expect_bytes(barrier, bytes);
            }
        });
    }

    /// Counts the bytes that a CTA is told at a meeting: a value of every warp of the cluster for each array, and before the first the target's logit.
    pub(super) fn bytes_of(&self, met: ClusterMeeting) -> u32 {
        let of_warps = 4 * self.cut.cluster * self.cut.warps();
        match met {
            ClusterMeeting::Maxima => of_warps + 4,
            ClusterMeeting::Sums => 2 * softmaxes(self.structure) as u32 * of_warps,
        }
    }

    /// Stores values in CTA `rank`, which sees them once it has [met](Self::meet).
    pub(super) fn store(
        &self,
        on: &mut PtxBuilder,
        met: ClusterMeeting,
        rank: PtxValue<u32>,
        values: impl IntoIterator<Item = (PtxAddress, PtxValue<f32>)>,
    ) {
        let barrier = self.barrier_of(met).map(|_| {
            let all = self.shared.meetings.expect("a barrier is one of them");
            PtxAddress::Cluster(on.cluster_address(all, rank), BARRIER * met as u32)
        });
        for (to, value) in values {
            match barrier {
                Some(barrier) => on.store_async(to, value, barrier),
                None => on.store(to, value),
            }
        }
    }

    /// Waits until all that was stored for a meeting is there. Where CTAs meet by stores nothing else is: see [`order_cta`](Self::order_cta).
    pub(super) fn meet(&self, on: &mut PtxBuilder, met: ClusterMeeting) {
        if let Some(barrier) = self.barrier_of(met) {
            on.wait_for_phase(barrier, 0);
        } else if self.cut.cluster > 1 {
            on.arrive_at_cluster(Arrival::Release);
            on.wait_for_cluster();
        } else {
            on.barrier();
        }
    }

    /// Orders what threads of this CTA did before the first meeting, and the reads of maxima, before what others of it do after. The
    /// cluster's barrier does that by itself; stores let this CTA see no more than the values stored, and the copies of the token and of
    /// the numbers are other threads'.
    pub(super) fn order_cta(&self, on: &mut PtxBuilder) {
        if self.shared.meetings.is_some() {
            on.barrier();
        }
    }

    /// Writes what a warp has into its place of every CTA's arrays, one after another.
    pub(super) fn tell(
        &self,
        on: &mut PtxBuilder,
        place: ThreadIndex,
        met: ClusterMeeting,
        arrays: PtxValue<u32>,
        values: &[PtxValue<f32>],
    ) {
        let cut = self.cut;
        // Lane r of every warp writes to CTA r: one store reaches one CTA, and the lanes' stores go out together.
        let is_teller = on.less(place.lane, cut.cluster);
        on.when(is_teller, |on| {
            let index = on.mul_add(place.rank, cut.warps(), place.warp);
            let to = on.mul_add(index, 4, arrays);
            let to = if cut.cluster > 1 {
                PtxAddress::Cluster(on.cluster_address(to, place.lane), 0)
            } else {
                PtxAddress::Shared(to, 0)
            };
            let array = 4 * cut.cluster * cut.warps();
            let values = values.iter().zip(0..).map(|(&value, i)| (to.plus(i * array), value));
            self.store(on, met, place.lane, values);
        });
    }

    /// All warps' values of the `i`-th array, folded: in every lane the same.
    pub(super) fn gather(
        &self,
        on: &mut PtxBuilder,
        place: ThreadIndex,
        arrays: PtxValue<u32>,
        i: u32,
        fold: impl Fn(&mut PtxBuilder, PtxValue<f32>, PtxValue<f32>) -> PtxValue<f32>,
    ) -> PtxValue<f32> {
        let warps = self.cut.cluster * self.cut.warps();
        // Each lane reads one warp's value, or several; lanes then fold by halves, in the same order in every CTA.
        let own = on.bits_and(place.lane, warps.min(32) - 1);
        let from = on.mul_add(own, 4, arrays);
        let mut values: Vec<PtxValue<f32>> = (0..warps.div_ceil(32))
            .map(|turn| on.load(PtxAddress::Shared(from, 4 * (i * warps + 32 * turn))))
            .collect();
        while values.len() > 1 {
            values = values.chunks(2).map(|pair| fold(on, pair[0], pair[1])).collect();
        }
        over_lanes(on, values[0], warps.min(32), fold)
    }
}

/// Shared memory of CTA `rank` of the cluster, that is `address` in this one.
pub(super) fn in_cta(on: &mut PtxBuilder, cut: RowCut, address: PtxValue<u32>, rank: PtxValue<u32>) -> PtxAddress {
    if cut.cluster > 1 {
        PtxAddress::Cluster(on.cluster_address(address, rank), 0)
    } else {
        PtxAddress::Shared(address, 0)
    }
}

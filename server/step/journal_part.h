// Which part of a job a journal is of: all of it, or the chunks that lie with one of the daemons
// that the job spans (docs/journal_format.md, "Jobs that span daemons").
#ifndef SHARDD_SERVER_STEP_JOURNAL_PART_H_
#define SHARDD_SERVER_STEP_JOURNAL_PART_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/contract/layout.h"
#include "proto/peer.pb.h"
#include "server/env/file_system.h"

namespace shardd::step {

// What a GRADIENT record is of: elements of the flat space that lie in one bucket.
struct GradientPart {
  uint64_t bucket = 0;
  contract::Range elements;
};

// The parts of the gradient that belong to `chunks` (ascending, disjoint), by bucket and element.
std::vector<GradientPart> GradientParts(const contract::Layout& layout,
                                        const std::vector<contract::Range>& chunks);

// The file PEERS of a journal: a checksum, then the message.
std::string EncodeJournalPeers(const v1::JobPeers& peers);
// NotFound: the journal is of a whole job. DataLoss: the file is damaged.
absl::StatusOr<v1::JobPeers> ReadJournalPeers(env::FileSystem* files, const std::string& directory);
// The chunks of the daemon that wrote `peers`.
std::vector<contract::Range> OwnChunks(const v1::JobPeers& peers);

// While chunks move, the journal that is to be, and the one that was, beside the job's.
std::string NextJournalPath(const std::string& directory);
std::string LastJournalPath(const std::string& directory);
// Puts the journal that is to be in the place of the one that was. A crash leaves what
// FinishJournalSwitch completes; an error leaves the one that was.
absl::Status SwitchJournal(env::FileSystem* files, const std::string& directory);
// For a daemon's start, of every job: completes what a crash interrupted. A journal that is to be
// stays as long as the one that was is there.
absl::Status FinishJournalSwitches(env::FileSystem* files, const std::string& parent);

}  // namespace shardd::step

#endif  // SHARDD_SERVER_STEP_JOURNAL_PART_H_

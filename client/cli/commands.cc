#include "client/cli/commands.h"

namespace shardd::cli {

std::vector<std::unique_ptr<Command>> AllCommands() {
  std::vector<std::unique_ptr<Command>> commands;
  for (auto make : {MakeRunCommand,
                    MakeStatusCommand,
                    MakeJobsCommand,
                    MakeShardsCommand,
                    MakeJobDeleteCommand,
                    MakeJobHandoverCommand,
                    MakeCheckpointSaveCommand,
                    MakeCheckpointCancelCommand,
                    MakeCheckpointListCommand,
                    MakeCheckpointVerifyCommand,
                    MakeCheckpointRestoreCommand,
                    MakeCheckpointExportCommand,
                    MakeCheckpointImportCommand,
                    MakeDrainCommand,
                    MakeConfigExplainCommand,
                    MakeOptimizerCheckCommand,
                    MakeDoctorCommand,
                    MakeFailpointArmCommand,
                    MakeFailpointWaitCommand,
                    MakeFailpointReleaseCommand,
                    MakeVersionCommand}) {
    commands.push_back(make());
  }
  return commands;
}

}  // namespace shardd::cli

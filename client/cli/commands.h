// All of shardctl's commands, one a file.
#ifndef SHARDD_CLIENT_CLI_COMMANDS_H_
#define SHARDD_CLIENT_CLI_COMMANDS_H_

#include <memory>
#include <vector>

#include "client/cli/command.h"

namespace shardd::cli {

std::unique_ptr<Command> MakeRunCommand();
std::unique_ptr<Command> MakeStatusCommand();
std::unique_ptr<Command> MakeJobsCommand();
std::unique_ptr<Command> MakeShardsCommand();
std::unique_ptr<Command> MakeJobDeleteCommand();
std::unique_ptr<Command> MakeJobHandoverCommand();
std::unique_ptr<Command> MakeDrainCommand();
std::unique_ptr<Command> MakeCheckpointSaveCommand();
std::unique_ptr<Command> MakeCheckpointCancelCommand();
std::unique_ptr<Command> MakeCheckpointListCommand();
std::unique_ptr<Command> MakeCheckpointVerifyCommand();
std::unique_ptr<Command> MakeCheckpointRestoreCommand();
std::unique_ptr<Command> MakeCheckpointExportCommand();
std::unique_ptr<Command> MakeCheckpointImportCommand();
std::unique_ptr<Command> MakeConfigExplainCommand();
std::unique_ptr<Command> MakeOptimizerCheckCommand();
std::unique_ptr<Command> MakeDoctorCommand();
std::unique_ptr<Command> MakeFailpointArmCommand();
std::unique_ptr<Command> MakeFailpointWaitCommand();
std::unique_ptr<Command> MakeFailpointReleaseCommand();
std::unique_ptr<Command> MakeVersionCommand();

// In the order of the help text.
std::vector<std::unique_ptr<Command>> AllCommands();

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_COMMANDS_H_

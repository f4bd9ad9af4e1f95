/* The tool's commands. Each gets its name in argv[0] and returns an exit code. */
#ifndef CLI_COMMANDS_H
#define CLI_COMMANDS_H
int command_bench(int argc, char **argv);
int command_doctor(int argc, char **argv);
int command_inspect(int argc, char **argv);
int command_pack(int argc, char **argv);
int command_plan(int argc, char **argv);
int command_replay(int argc, char **argv);
int command_report(int argc, char **argv);
int command_stream(int argc, char **argv);
int command_top(int argc, char **argv);
int command_unpack(int argc, char **argv);
int command_verify(int argc, char **argv);
#endif

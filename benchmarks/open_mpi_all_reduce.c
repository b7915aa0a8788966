/* Times MPI_Allreduce in place: prints "bytes median_us" for each size given after the iterations.
   Built and started by collective_execution.py. */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  int iterations = atoi(argv[1]);
  double *times = malloc(sizeof(double) * iterations);
  for (int arg = 2; arg < argc; arg++) {
    size_t bytes = strtoull(argv[arg], NULL, 10);
    float *data = calloc(bytes / sizeof(float), sizeof(float));
    for (int i = -2; i < iterations; i++) { /* two to warm up */
      MPI_Barrier(MPI_COMM_WORLD);
      double began = MPI_Wtime();
      MPI_Allreduce(MPI_IN_PLACE, data, (int)(bytes / sizeof(float)), MPI_FLOAT, MPI_SUM,
                    MPI_COMM_WORLD);
      double mine = MPI_Wtime() - began, slowest;
      MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      if (i >= 0) times[i] = slowest;
    }
    qsort(times, iterations, sizeof(double), ascending);
    if (rank == 0) printf("%zu %.3f\n", bytes, times[iterations / 2] * 1e6);
    free(data);
  }
  free(times);
  MPI_Finalize();
  return 0;
}
